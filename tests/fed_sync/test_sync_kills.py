"""Five agents and an endpoint killed at each of its commit points: the published bytes of a run without a kill."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agents import ANNA, Phone, learning
from engines import until
from updates import RULES

from fednl_runtime.crash import VARIABLE
from fednl_runtime.fed_sync.device import participant
from fednl_runtime.fed_sync.device.client import ContactError
from fednl_runtime.fed_sync.fleet import intake
from fednl_runtime.fed_sync.update import new_update_id
from fednl_runtime.server_api.commands.aggregator import fleet_at

PROGRAM = Path(sys.executable).with_name("fednl-runtime")
DEVICES, ROUNDS = 5, 3
POINTS = [f"{act}.{moment}" for act, moments in [
    ("update", ("before_blob", "after_blob", "before_commit", "after_commit")),
    ("close", ("before_blob", "after_blob", "before_commit", "after_commit")),
] for moment in moments]  # fmt: skip
IDS = [[new_update_id(time.time() + base) for _ in range(DEVICES)] for base in range(ROUNDS + 2)]
"""By base version and device, the same in every run."""


class Process:
    """A real endpoint that dies at one point after the other, and is started again each time."""

    def __init__(self, folder: Path, points: list[str]) -> None:
        self.folder, self.points, self.deaths = folder, list(points), 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.start()

    def start(self) -> None:
        where = ["--state-dir", str(self.folder / "state"), "--population", "p", "--port", self.url.rpartition(":")[2]]
        rounds = ["--rules", str(self.folder / "rules.safetensors"), "--goal", str(DEVICES), "--optimizer", "momentum"]
        environment = {**os.environ, **({VARIABLE: self.points.pop(0)} if self.points else {})}
        command = [PROGRAM, "aggregator", "serve", *where, *rounds]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        assert any("Devices pin" in line for line in self.process.stderr), "the endpoint did not start"

    def insist(self, call):
        """What a call gives once the endpoint lives through it."""
        while True:
            try:
                return call()
            except ContactError as error:
                if error.code != "network":
                    raise
            assert self.process.wait(timeout=30) == -9
            self.deaths += 1
            self.process.stderr.close()
            self.start()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)
        self.process.stderr.close()


@contextlib.contextmanager
def phones_of(server: Process) -> Iterator[list[Phone]]:
    """Devices that read different texts and learn different things."""
    fleet = fleet_at(server.folder / "state", None, "p")
    tokens = [intake.new_token(fleet) for _ in range(DEVICES)]
    fleet.repository.close()
    with contextlib.ExitStack() as opened:
        phones = []
        for number, token in enumerate(tokens):
            folder = server.folder / f"phone {number}"
            train = learning(7 * number, 0.01 + 0.001 * number)
            phone = Phone(folder, server.url, time.time, token, text=0, train=train)
            opened.enter_context(contextlib.closing(phone))
            phone.device.record(ANNA, (number,) * (50 + number))
            phones.append(phone)
        yield phones


def rounds(phone: Phone) -> dict[str, Any]:
    """What the endpoint tells of its rounds."""
    return phone.part._endpoint.ask("GET", "/v1/populations/p/rounds").json()


def play(folder: Path, points: list[str], monkeypatch) -> tuple[list[tuple[str, int]], int]:
    """Digest and members of every version, and how often the endpoint died."""
    folder.mkdir()
    RULES.save(folder / "rules.safetensors")
    server = Process(folder, points)
    try:
        with phones_of(server) as phones:
            for version in range(2, ROUNDS + 2):
                for number, phone in enumerate(phones):
                    monkeypatch.setattr(
                        participant, "new_update_id", lambda _, p=phone, n=number: IDS[p.part.version][n]
                    )
                    server.insist(phone.contact)
                until(lambda v=version: server.insist(functools.partial(rounds, phones[0]))["current_version"] == v)
            found = rounds(phones[0])["versions"]
            for phone in phones:
                counts = phone.device.outbox.counts()
                assert counts["accepted"] >= ROUNDS  # more if it trained on the last version before the others
                assert (counts["pending"], counts["sent"], counts["refused"]) == (0, 0, 0)
    finally:
        server.stop()
    return [(version["sha256"], version["members"]) for version in found], server.deaths


def test_a_kill_at_every_commit_point_changes_no_published_byte_and_loses_no_update(tmp_path, monkeypatch):
    undisturbed, deaths = play(tmp_path / "undisturbed", [], monkeypatch)
    assert [members for _, members in undisturbed] == [DEVICES] * ROUNDS + [0]
    assert deaths == 0
    assert play(tmp_path / "killed", POINTS, monkeypatch) == (undisturbed, len(POINTS))
