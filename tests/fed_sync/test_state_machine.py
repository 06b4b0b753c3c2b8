"""Whatever devices, operators, crashes and clocks do: every accepted update is in exactly one version, once."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import Clock, device_key, fleet_in
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from updates import RULES, SCHEMA, body_of, one_hot

from fednl_runtime.fed_sync.errors import Refusal
from fednl_runtime.fed_sync.fleet import intake, repository, rounds
from fednl_runtime.fed_sync.fleet.policy import Policy
from fednl_runtime.fed_sync.fleet.population import Fleet, read_rules
from fednl_runtime.fed_sync.fleet.tables import Device, Update, Version
from fednl_runtime.fed_sync.manifest import open_manifest
from fednl_runtime.fed_sync.signing import key_id, public_text, sign_text
from fednl_runtime.fed_sync.update import new_update_id

GOAL, MINIMUM = 3, 2
POLICY = Policy(goal=GOAL, minimum=MINIMUM, deadline_s=1000.0, staleness=1, max_step_norm=0.9, clip_norm=1.0)
DEVICES = 6
POINTS = (
    "update.before_blob",
    "update.after_blob",
    "update.before_commit",
    "update.after_commit",
    "close.before_blob",
    "close.after_blob",
    "close.before_commit",
    "close.after_commit",
)
UNTIMELY = ("device_already_contributed", "stale_base")
OPERATIONS = {"count": 0}


class Crash(BaseException):
    """The process dies here."""


def dying_at(point: str) -> Any:
    """A crash point that kills at one name."""

    def crash_point(name: str) -> None:
        if name == point:
            raise Crash

    return crash_point


def refusal_of(call: Callable[[], object]) -> str | None:
    """The code with which a call is refused, None if it is granted."""
    try:
        call()
    except Refusal as refusal:
        return refusal.code
    return None


@dataclasses.dataclass
class Sent:
    """An upload that some device holds and may send again."""

    device: int
    update_id: str
    body: bytes
    accepted: bool = False


class Federation(RuleBasedStateMachine):
    """Six devices whose updates are one-hot, an operator, a clock, and a process that may die at any commit."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.clock = Clock()
        self.fleet: Fleet = fleet_in(Path(self.folder.name), POLICY, self.clock)
        self.devices: list[Device] = []
        self.sent: list[Sent] = []
        self.fresh = 100

    @initialize()
    def begin(self) -> None:
        """Enrol everybody."""
        for number in range(DEVICES):
            token = intake.new_token(self.fleet)
            self.devices.append(intake.enrol(self.fleet, token, device_key(number).public_key()))

    def teardown(self) -> None:
        self.fleet.repository.close()
        self.folder.cleanup()

    def current(self) -> int:
        with self.fleet.repository.read() as records:
            return records.population("p").current

    def upload(self, sent: Sent) -> None:
        """Send; an answer of either kind says that the update is safe."""
        OPERATIONS["count"] += 1
        intake.receive(self.fleet, self.devices[sent.device], sent.update_id, sent.body)
        sent.accepted = True

    def make(self, device: int, base: int) -> Sent:
        value = 0.1 + 0.01 * (len(self.sent) % 50)
        body = body_of(one_hot(len(self.sent) % SCHEMA.size, value, base_version=base, num_tokens=100))
        self.sent.append(Sent(device, new_update_id(self.clock()), body))
        return self.sent[-1]

    @rule(device=st.integers(0, DEVICES - 1), lag=st.sampled_from([0, 0, 0, 1, 2, -1]))
    def send(self, device: int, lag: int) -> None:
        """A new update from the current version, a late one, or one from the future."""
        sent = self.make(device, max(0, self.current() - lag))
        assert refusal_of(lambda: self.upload(sent)) in (None, *UNTIMELY, "unknown_base")

    @precondition(lambda self: self.sent)
    @rule(choice=st.integers(0, 10**6))
    def repeat(self, choice: int) -> None:
        """Send an update again, whatever became of it."""
        sent = self.sent[choice % len(self.sent)]
        before = sent.accepted
        code = refusal_of(lambda: self.upload(sent))
        assert code is None or not before, "what was accepted is always answered as accepted"

    @rule(device=st.integers(0, DEVICES - 1), position=st.integers(0, 10**6), byte=st.integers(1, 255))
    def corrupt(self, device: int, position: int, byte: int) -> None:
        """An update that was damaged on its way, beyond its numbers: it is refused."""
        OPERATIONS["count"] += 1
        body = bytearray(body_of(one_hot(0, base_version=self.current())))
        body[position % (int.from_bytes(body[:8], "little") // 4)] ^= byte
        with pytest.raises(Refusal):
            intake.receive(self.fleet, self.devices[device], new_update_id(self.clock()), bytes(body[:-1]))

    @rule(device=st.integers(0, DEVICES - 1), point=st.sampled_from(POINTS), again=st.booleans())
    def die(self, device: int, point: str, again: bool) -> None:
        """The process dies at some point of an upload or of the round that it closes, and starts again."""
        sent = self.make(device, self.current())
        with pytest.MonkeyPatch.context() as patch:
            for module in (intake, rounds):
                patch.setattr(module, "crash_point", dying_at(point))
            with contextlib.suppress(Crash, Refusal):
                self.upload(sent)
        self.fleet.repository.close()
        self.fleet = fleet_in(Path(self.folder.name), POLICY, self.clock)
        if again:
            assert refusal_of(lambda: self.upload(sent)) in (None, *UNTIMELY)

    @rule(seconds=st.sampled_from([1.0, 400.0, 1000.0, 90_000.0]))
    def wait(self, seconds: float) -> None:
        """Time passes, and the endpoint looks at its rounds and cleans up."""
        OPERATIONS["count"] += 1
        self.clock.now += seconds
        rounds.tick(self.fleet)
        rounds.clean(self.fleet)

    @rule(device=st.integers(0, DEVICES - 1))
    def rotate(self, device: int) -> None:
        """A device changes its key and is still the same device."""
        OPERATIONS["count"] += 1
        self.fresh += 1
        key = device_key(self.fresh)
        text, before = public_text(key.public_key()), self.devices[device]
        proof = sign_text(intake.rotation_text(before.id, text), key)
        intake.rotate(self.fleet, before, text, proof)
        self.devices[device] = intake.device_of(self.fleet, key_id(key.public_key()))
        assert self.devices[device].id == before.id

    @rule()
    def publish(self) -> None:
        """The operator closes the round early."""
        OPERATIONS["count"] += 1
        assert refusal_of(lambda: rounds.publish_now(self.fleet)) in (None, "too_few_updates")

    @rule(back=st.integers(1, 3))
    def roll_back(self, back: int) -> None:
        """The operator goes back."""
        OPERATIONS["count"] += 1
        to = max(1, self.current() - back)
        assert refusal_of(lambda: rounds.rollback(self.fleet, to)) in (None, "not_published")

    @rule(device=st.integers(0, DEVICES - 1))
    def pause(self, device: int) -> None:
        """The operator pauses the fleet: nothing new is taken until it goes on, and the update may come then."""
        OPERATIONS["count"] += 1
        rounds.pause(self.fleet)
        sent = self.make(device, self.current())
        assert refusal_of(lambda: self.upload(sent)) == "paused"
        rounds.resume(self.fleet)
        assert refusal_of(lambda: self.upload(sent)) in (None, "device_already_contributed")

    def rows(self) -> tuple[list[Version], dict[str, Update]]:
        with self.fleet.repository.read() as records:
            found = {sent.update_id: records.update(sent.update_id) for sent in self.sent}
            return list(reversed(records.versions("p"))), {name: row for name, row in found.items() if row}

    @invariant()
    def every_accepted_update_is_in_exactly_one_place(self) -> None:
        """Pending in the open round, or settled in one version, which counts as many members as it has."""
        versions, rows = self.rows()
        assert {sent.update_id for sent in self.sent if sent.accepted} <= set(rows)
        for version in versions:
            kept = [
                row
                for row in rows.values()
                if row.target == version.version and row.status in ("counted", "quarantined")
            ]
            repeated = (
                version.rule != "initial" and version.rollback_of is None and not self.released(version, versions)
            )
            assert len(kept) == (version.members if repeated else 0)
        with self.fleet.repository.read() as records:
            target = records.population("p").target
        assert {row.target for row in rows.values() if row.status == "pending"} <= {target}

    @staticmethod
    def released(version: Version, versions: list[Version]) -> bool:
        return any(other.state == "released" and other.version == version.version - 1 for other in versions)

    @invariant()
    def nothing_is_counted_twice(self) -> None:
        """The step of each version is exactly the mean of the one-hot updates that it counts."""
        versions, rows = self.rows()
        places = {sent.update_id: index for index, sent in enumerate(self.sent)}
        for version in versions[-2:]:
            members = [row for row in rows.values() if row.target == version.version and row.status == "counted"]
            if not members:
                continue
            expected = np.zeros(SCHEMA.size)
            for row in members:
                late = self.staleness(row, version, versions)
                index = places[row.id]
                expected[index % SCHEMA.size] += (0.1 + 0.01 * (index % 50)) / np.sqrt(1 + late) / len(members)
            before = SCHEMA.vector(read_rules(self.fleet, versions[version.prev_version - 1]))
            moved = SCHEMA.vector(read_rules(self.fleet, version)) - before
            np.testing.assert_allclose(moved, expected, atol=2e-6)

    @staticmethod
    def staleness(row: Update, version: Version, versions: list[Version]) -> int:
        """Versions that were current between the update's base and this one."""
        chain, number = [], version.prev_version
        while number > row.base_version:
            chain.append(number)
            number = versions[number - 1].prev_version
        assert number == row.base_version, "an update counts only where its base is an ancestor"
        return len(chain)

    @invariant()
    def the_chain_of_versions_is_whole(self) -> None:
        """From the current version every manifest leads to the one before, down to the first; numbers only grow."""
        versions, _ = self.rows()
        assert [version.version for version in versions] == list(range(1, len(versions) + 1))
        number, steps = self.current(), 0
        while number:
            version = versions[number - 1]
            assert version.state == "published"
            manifest = open_manifest(version.manifest or "", [self.fleet.key.public_key()])
            assert (manifest.version, manifest.sha256, manifest.prev_version) == (
                number,
                version.sha256,
                version.prev_version,
            )
            assert manifest.prev_version < number
            number, steps = version.prev_version, steps + 1
            if steps == 3:
                break


def test_two_thousand_random_operations_keep_every_law(monkeypatch):
    # Processes die here, not machines: waiting for the disk would only take ten times as long.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(repository, "PRAGMAS", ("journal_mode=WAL", "synchronous=OFF", "foreign_keys=ON"))
    OPERATIONS["count"] = 0
    machine = settings(max_examples=27, stateful_step_count=100, deadline=None)
    run_state_machine_as_test(Federation, settings=machine)
    assert OPERATIONS["count"] >= 2000
    assert RULES.schema_hash == SCHEMA.hash
