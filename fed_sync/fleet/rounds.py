"""Rounds: when one closes, what it publishes, and how an operator steps in; each change is one transaction."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import numpy as np

from fednl_runtime.crash import crash_point
from fednl_runtime.fed_sync.aggregate import Member, aggregate
from fednl_runtime.fed_sync.errors import BlobError, Refusal
from fednl_runtime.fed_sync.fleet.policy import Policy
from fednl_runtime.fed_sync.fleet.population import (
    Fleet,
    add_version,
    bases_of,
    manifest_of,
    read_rules,
    rules_bytes,
    schema_of,
)
from fednl_runtime.fed_sync.fleet.repository import Records
from fednl_runtime.fed_sync.fleet.tables import Population, Update, Version
from fednl_runtime.fed_sync.optimize import State, gate
from fednl_runtime.fed_sync.tensors import pack, unpack
from fednl_runtime.fed_sync.update import Schema, Vector, decode
from fednl_runtime.fed_sync.validate import ID_SKEW_S, ID_WINDOW_S
from fednl_runtime.rules import RuleSet, in_range

log = logging.getLogger("fednl_runtime")
KEEP_BODIES_S = 7 * 86_400
"""Seconds for which the body of a settled update is kept."""
ORPHAN_S = 86_400
"""Seconds after which a file that no row names is a leftover of a crash."""


def tick(fleet: Fleet) -> Version | None:
    """Do what is due: close the round, set a new deadline, sign the manifest anew. May be called at any time."""
    with fleet.repository.read() as records:
        population = records.population(fleet.population)
        waiting, current = len(records.pending(fleet.population)), records.version(fleet.population, population.current)
    policy, now = Policy.from_json(population.policy), fleet.clock()
    if now - current.signed > policy.manifest_s / 2:
        _resign(fleet)
    if population.paused or not (waiting >= policy.goal or now >= population.deadline):
        return None
    return _close(fleet, now, early=False)


def publish_now(fleet: Fleet) -> Version:
    """Close the open round before its time, with the updates that are there.

    Raises:
        Refusal: `too_few_updates` for the rule, or `privacy_budget_spent`.
    """
    version = _close(fleet, fleet.clock(), early=True)
    if version is None:
        raise Refusal("privacy_budget_spent", "Another noised round would cost more privacy than was promised.")
    return version


def _close(fleet: Fleet, now: float, early: bool) -> Version | None:
    """Aggregate and publish in one transaction; None if the round is not due after all."""
    with fleet.repository.write(fleet.population) as records:
        population = records.population(fleet.population)
        policy = Policy.from_json(population.policy)
        members = _members(fleet, records, population, policy)
        needed = policy.rule.least if early else policy.goal if now < population.deadline else policy.minimum
        if len(members) < needed:
            if early:
                raise Refusal("too_few_updates", f"{policy.rule.kind} needs {needed} updates. Wait for more.")
            if now >= population.deadline:
                later = {"deadline": now + policy.deadline_s, "extensions": population.extensions + 1}
                records.change_population(population.name, **later)
            return None
        if policy.privacy is not None and not policy.privacy.affords(population.releases + 1):
            records.change_population(population.name, paused="privacy_budget_spent")
            return None
        version = _aggregated(fleet, records, population, policy, members)
        for member in members:
            records.settle(member.update_id, _fate_in(version), version.version)
        _turn(records, population, policy, version, now, releases=population.releases + (policy.privacy is not None))
        crash_point("close.before_commit")
    crash_point("close.after_commit")
    log.info("version %d of %s: %s", version.version, population.name, version.state)
    return version


def _fate_in(version: Version) -> str:
    return "counted" if version.state == "published" else version.state


def _members(fleet: Fleet, records: Records, population: Population, policy: Policy) -> list[Member]:
    """The open round's updates; one whose file is gone is settled as lost, and the round goes on."""
    schema, found = schema_of(population), []
    published = records.published_after(population.name, 0)
    for update in records.pending(population.name):
        try:
            vector = schema.vector(decode(fleet.blobs.get(update.sha256), schema).delta)
        except (BlobError, Refusal) as error:
            log.error("an update is lost: %s", error)
            records.settle(update.id, "lost", update.target)
            continue
        staleness = sum(version > update.base_version for version in published)
        found.append(Member(update.id, vector, update.num_tokens, staleness))
    return found


def _aggregated(
    fleet: Fleet, records: Records, population: Population, policy: Policy, members: Sequence[Member]
) -> Version:
    """The round's version with its files written; in quarantine if the gate does not let it pass."""
    schema, current = schema_of(population), records.version(population.name, population.current)
    before = schema.vector(read_rules(fleet, current))
    state: State = {} if current.optimizer_sha256 is None else unpack(fleet.blobs.get(current.optimizer_sha256))[0]
    bound = policy.norm_bound(schema.size)
    if policy.privacy is None:
        delta = aggregate(members, policy.rule, bound)
    else:
        delta = policy.privacy.noised_mean(members, bound, policy.goal, np.random.default_rng())
    step, state = policy.optimizer.step(delta, state)
    rules = _moved(schema, before, step, population.fingerprint)
    reason = gate(before, schema.vector(rules.tensors), policy.max_step_norm)
    data = rules_bytes(rules, population, population.target)
    crash_point("close.before_blob")
    version = Version(
        population=population.name,
        version=population.target,
        prev_version=population.current,
        state="published" if reason is None else "quarantined",
        sha256=fleet.blobs.put(data),
        size=len(data),
        optimizer_sha256=fleet.blobs.put(pack(state, {})) if state else None,
        created=fleet.clock(),
        members=len(members),
        rule=policy.rule.kind,
        reason=reason,
        epsilon=None if policy.privacy is None else policy.privacy.epsilon(population.releases + 1),
    )
    crash_point("close.after_blob")
    return add_version(fleet, records, population, version)


def _moved(schema: Schema, before: Vector, step: Vector, fingerprint: str) -> RuleSet:
    """The rules after a step, each number inside its safe range; not finite where the step is not."""
    with np.errstate(over="ignore"):  # what becomes infinite is stopped by the gate
        moved = schema.tensors(before + step)
    return RuleSet({name: in_range(name, value) for name, value in moved.items()}, fingerprint)


def _turn(
    records: Records, population: Population, policy: Policy, version: Version, now: float, releases: int
) -> None:
    """Open the next round; a published version becomes the current one."""
    records.change_population(
        population.name,
        current=version.version if version.state == "published" else population.current,
        target=version.version + 1,
        opened=now,
        deadline=now + policy.deadline_s,
        extensions=0,
        releases=releases,
    )


def rollback(fleet: Fleet, to: int) -> Version:
    """Publish the rules of an earlier version again and withdraw what came between.

    Updates that were made from withdrawn rules expire; the others move to the next round.

    Raises:
        Refusal: `unknown_version`, or `not_published` unless the version is an earlier published one.
    """
    with fleet.repository.write(fleet.population) as records:
        population = records.population(fleet.population)
        source = records.version(fleet.population, to)
        if source.state != "published" or to == population.current:
            raise Refusal("not_published", f"Version {to} is {source.state}, and no earlier one to go back to.")
        for number in records.published_after(fleet.population, to):
            records.set_state(fleet.population, number, "withdrawn")
        return _again(fleet, records, population, source, prev=to, rollback_of=population.current)


def release(fleet: Fleet, number: int) -> Version:
    """Publish the rules of a version in quarantine, if nothing was published since.

    Raises:
        Refusal: `unknown_version`, or `not_quarantined`.
    """
    with fleet.repository.write(fleet.population) as records:
        population = records.population(fleet.population)
        source = records.version(fleet.population, number)
        if source.state != "quarantined" or source.prev_version != population.current:
            raise Refusal(
                "not_quarantined", f"Version {number} is {source.state}, or no longer the next of the current."
            )
        records.set_state(fleet.population, number, "released")
        return _again(fleet, records, population, source, prev=population.current, rollback_of=None)


def _again(
    fleet: Fleet, records: Records, population: Population, source: Version, prev: int, rollback_of: int | None
) -> Version:
    """Publish the rules of a version under the next number."""
    policy, now = Policy.from_json(population.policy), fleet.clock()
    rules = RuleSet(dict(read_rules(fleet, source)), population.fingerprint)
    data = rules_bytes(rules, population, population.target)
    version = dataclasses.replace(
        source,
        version=population.target,
        prev_version=prev,
        state="published",
        sha256=fleet.blobs.put(data),
        size=len(data),
        created=now,
        reason=None,
        rollback_of=rollback_of,
    )
    version = add_version(fleet, records, population, version)
    _turn(records, population, policy, version, now, releases=population.releases)
    _carry_over(records, records.population(population.name), policy)
    return version


def _carry_over(records: Records, population: Population, policy: Policy) -> None:
    """Move what waits into the new round; what started from rules that are withdrawn or too old expires."""
    bases = bases_of(records, population, policy)
    waiting: list[Update] = records.pending(population.name)
    for update in waiting:
        if update.base_version in bases:
            records.settle(update.id, "pending", population.target)
        else:
            records.settle(update.id, "expired", update.target)


def pause(fleet: Fleet, reason: str = "operator") -> None:
    """Take no updates and close no rounds until `resume`."""
    with fleet.repository.write(fleet.population) as records:
        records.change_population(fleet.population, paused=reason)


def resume(fleet: Fleet) -> None:
    """Go on after a pause; the open round gets a whole new deadline."""
    with fleet.repository.write(fleet.population) as records:
        policy = Policy.from_json(records.population(fleet.population).policy)
        records.change_population(fleet.population, paused=None, deadline=fleet.clock() + policy.deadline_s)


def _resign(fleet: Fleet) -> None:
    with fleet.repository.write(fleet.population) as records:
        population = records.population(fleet.population)
        current = records.version(fleet.population, population.current)
        text = manifest_of(fleet, population, current)
        records.resign(fleet.population, current.version, text, fleet.clock())


def clean(fleet: Fleet) -> int:
    """Delete what is no longer needed: bodies after a week, ids after their window, leftovers of crashes."""
    now = fleet.clock()
    with fleet.repository.write(fleet.population) as records:
        records.forget_updates(now - ID_WINDOW_S - ID_SKEW_S)
        records.forget_tokens(now - ID_WINDOW_S)
        needed = records.blobs_in_use(now - KEEP_BODIES_S)
    leftovers = [name for name, made in fleet.blobs.names() if name not in needed and made < now - ORPHAN_S]
    for name in leftovers:
        fleet.blobs.delete(name)
    return len(leftovers)


def tick_safely(fleet: Fleet) -> None:
    """`tick`, with whatever goes wrong logged: an upload that is safe must be answered so, and rounds must go on."""
    try:
        tick(fleet)
    except Exception:
        log.exception("the round could not be closed and waits")
