"""A population at its server: where its rows, files and signing key are, and how it begins."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fednl_runtime.fed_sync.errors import PolicyError
from fednl_runtime.fed_sync.fleet.blobs import Blobs
from fednl_runtime.fed_sync.fleet.policy import Policy
from fednl_runtime.fed_sync.fleet.repository import Records, Repository
from fednl_runtime.fed_sync.fleet.tables import Population, Version
from fednl_runtime.fed_sync.manifest import Manifest, sign_manifest
from fednl_runtime.fed_sync.tensors import Array, pack, unpack
from fednl_runtime.fed_sync.update import Schema
from fednl_runtime.fed_sync.validate import Bounds
from fednl_runtime.rules import RuleSet

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
CONTACTS = 20.0
"""Contacts a second that a fleet is spread to at most."""


@dataclasses.dataclass(frozen=True)
class Fleet:
    """One population; `clock` tells seconds since 1970."""

    population: str
    repository: Repository
    blobs: Blobs
    key: Ed25519PrivateKey
    clock: Callable[[], float] = time.time


def found(fleet: Fleet, rules: RuleSet | None, policy: Policy) -> None:
    """Begin a population with its first rules, or give an existing one a new policy.

    Raises:
        PolicyError: it needs first rules, holds rules of another schema, or made a promise of privacy that the
            new policy would break.
    """
    if not NAME.fullmatch(fleet.population):
        raise PolicyError(f"{fleet.population!r} is no name for a population; use a-z, 0-9 and -, at most 64.")
    if policy.privacy is not None and not policy.privacy.affords(1):
        raise PolicyError("The privacy budget does not allow a single round. Add noise or raise the budget.")
    with fleet.repository.write(fleet.population) as records:
        if records.has_population(fleet.population):
            _change(records, records.population(fleet.population), rules, policy)
        elif rules is None:
            raise PolicyError("This population is new here: name its first rules with --rules or --model.")
        else:
            _begin(fleet, records, rules, policy)


def _change(records: Records, known: Population, rules: RuleSet | None, policy: Policy) -> None:
    if rules is not None and rules.schema_hash != known.schema:
        raise PolicyError("The population shares rules of another model. Give these rules another population.")
    before = Policy.from_json(known.policy).privacy
    if known.releases and _noise(before) != _noise(policy.privacy):
        raise PolicyError(
            f"{known.releases} noised rounds were published with other noise, and their cost could no longer be "
            "told. Keep the noise multiplier and delta, or begin another population."
        )
    records.change_population(known.name, policy=policy.to_json())


def _noise(privacy: object) -> tuple[object, object]:
    return getattr(privacy, "noise_multiplier", None), getattr(privacy, "delta", None)


def _begin(fleet: Fleet, records: Records, rules: RuleSet, policy: Policy) -> None:
    now = fleet.clock()
    population = Population(
        name=fleet.population,
        schema=rules.schema_hash,
        fingerprint=rules.fingerprint,
        shapes=json.dumps({name: list(shape) for name, shape in rules.shapes.items()}, sort_keys=True),
        policy=policy.to_json(),
        current=1,
        target=2,
        opened=now,
        deadline=now + policy.deadline_s,
        extensions=0,
        releases=0,
        paused=None,
    )
    data = rules_bytes(rules, population, 1)
    records.add(population)
    first = Version(fleet.population, 1, 0, "published", fleet.blobs.put(data), len(data), None, now, 0, "initial")
    add_version(fleet, records, population, first)


def add_version(fleet: Fleet, records: Records, population: Population, version: Version) -> Version:
    """Add a version with its manifest, signed if it is published."""
    if version.state == "published":
        manifest = manifest_of(fleet, population, version)
        version = dataclasses.replace(version, manifest=manifest, signed=fleet.clock())
    records.add(version)
    return version


def manifest_of(fleet: Fleet, population: Population, version: Version) -> str:
    """The manifest of a version, signed now."""
    policy, now = Policy.from_json(population.policy), fleet.clock()
    manifest = Manifest(
        population=population.name,
        version=version.version,
        prev_version=version.prev_version,
        schema=population.schema,
        sha256=version.sha256,
        size=version.size,
        created=int(version.created),
        expires=int(now + policy.manifest_s),
        min_agent=policy.min_agent,
        members=version.members,
        rule=version.rule,
        epsilon=version.epsilon,
        rollback_of=version.rollback_of,
    )
    return sign_manifest(manifest, fleet.key)


def schema_of(population: Population) -> Schema:
    """The rules that a population shares."""
    return Schema({name: tuple(shape) for name, shape in json.loads(population.shapes).items()}, population.schema)


def bounds_of(population: Population, policy: Policy) -> Bounds:
    """What an update to a population may be."""
    schema = schema_of(population)
    return Bounds(schema, policy.max_tokens, policy.absurd * policy.norm_bound(schema.size))


def bases_of(records: Records, population: Population, policy: Policy) -> dict[int, int]:
    """The versions an update may start from, each with the number of published versions since."""
    recent = reversed(records.published_after(population.name, 0)[-policy.staleness - 1 :])
    return {version: staleness for staleness, version in enumerate(recent)}


def next_sync(population: Population, policy: Policy, devices: int) -> dict[str, int]:
    """When a device should come again: spread, so that all together stay below CONTACTS a second."""
    least = max(policy.sync_s, devices / CONTACTS) * (4 if population.paused else 1)
    return {"min_s": round(least), "max_s": round(2 * least)}


def rules_bytes(rules: RuleSet, population: Population, version: int) -> bytes:
    """The file of published rules: what `serve --rules` reads, with population and version as notes."""
    notes = {"fednl.fingerprint": rules.fingerprint, "fednl.schema": rules.schema_hash}
    notes |= {"population": population.name, "version": str(version)}
    return pack({name: np.asarray(value, np.float32) for name, value in rules.tensors.items()}, notes)


def read_rules(fleet: Fleet, version: Version) -> Mapping[str, Array]:
    """The rules of a version by name."""
    return unpack(fleet.blobs.get(version.sha256))[0]
