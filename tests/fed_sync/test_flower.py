"""Flower carries the same uploads to the same intake: bad ones are dropped, each counts once, the bytes agree."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

pytest.importorskip("flwr", reason="Flower has an environment of its own; .ci/run makes it")

from agents import TinyModel, endpoint_of, learning, pending
from fleets import Caller, Clock, device_key, fleet_of, join_all, rules_now, send
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, Metadata, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from updates import GOOD, HOSTILE, body_of, update_of

from fednl_runtime.fed_sync.device.client import Endpoint
from fednl_runtime.fed_sync.device.folder import Device, Invitation, joined
from fednl_runtime.fed_sync.device.participant import SyncSettings
from fednl_runtime.fed_sync.errors import SyncError
from fednl_runtime.fed_sync.fleet import intake, rounds
from fednl_runtime.fed_sync.flower.client_app import opened
from fednl_runtime.fed_sync.flower.letters import ADDRESS, HEADERS, RECORD, Posted, answers_in, reply, upload_path
from fednl_runtime.fed_sync.flower.mailbox import Correspondent, Mailbox, exchange
from fednl_runtime.fed_sync.flower.strategy import RulesStrategy
from fednl_runtime.fed_sync.signing import key_id, sign_request
from fednl_runtime.fed_sync.update import MEDIA_TYPE, new_update_id
from fednl_runtime.session import SessionKey

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/federation.md").read_text()
PROGRAMS = Path(sys.executable).parent
NODES = (11, 22, 33, 44, 55)
NAN = "a number that is none"


class Grid:
    """The nodes that are there, as a strategy asks for them."""

    def __init__(self, nodes=NODES) -> None:
        self.nodes = nodes

    def get_node_ids(self):
        return self.nodes


def message_of(content: RecordDict | None, node: int, made: float, error: Error | None = None) -> Message:
    """A reply from a node, made at a time."""
    about = Metadata(1, "m", node, 0, "r", "", made, 3600.0, "train")
    return Message(metadata=about, content=content, error=error)


def posted(key, update_id: str, body: bytes, now: float, **headers: str) -> Posted:
    """An upload as a device signs it; `headers` replace what it signed."""
    url = ADDRESS + upload_path("p", update_id)
    request = httpx.Request("PUT", url, content=body, headers={"content-type": MEDIA_TYPE})
    sign_request(request, key, body, now)
    return Posted(update_id, {name: request.headers[name] for name in HEADERS} | headers, body)


def upload(fleet, number: int, update, update_id: str = "", node: int | None = None, **headers: str) -> Message:
    """The reply of a device with an update."""
    now = fleet.clock()
    body = update if isinstance(update, bytes) else body_of(update)
    letter = posted(device_key(number), update_id or new_update_id(now), body, now, **headers)
    return message_of(reply(letter, 1), NODES[number] if node is None else node, now)


def device_of(fleet, number: int):
    return intake.device_of(fleet, key_id(device_key(number).public_key()))


def refusals(fleet):
    with fleet.repository.read() as records:
        return records.count_refusals("p")


def digest_of(fleet, version: int) -> str:
    with fleet.repository.read() as records:
        return records.version("p", version).sha256


def metrics(strategy: RulesStrategy, *replies: Message) -> dict[str, int]:
    return dict(strategy.aggregate_train(1, replies)[1])


@pytest.fixture(autouse=True)
def task(monkeypatch):
    """Be the task of a run, as Flower's own process of the app is."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@contextlib.contextmanager
def fleet_at(folder: Path, **settings):
    """A fleet with five devices."""
    folder.mkdir()
    with fleet_of(folder, **settings) as fleet:
        join_all(fleet, 5)
        yield fleet


@pytest.fixture(name="fleet")
def fleet_fixture(tmp_path):
    with fleet_at(tmp_path / "fleet", sync_s=60.0) as fleet:
        yield fleet


@pytest.fixture(name="strategy")
def strategy_fixture(fleet):
    return RulesStrategy(fleet, nodes=1, wait_s=0.0)


def test_bad_replies_are_dropped_and_the_round_goes_on_to_the_bytes_that_http_gives(tmp_path):
    ids, updates = [new_update_id(Clock().now) for _ in range(3)], [update_of(seed) for seed in range(3)]
    with fleet_at(tmp_path / "flower", goal=3) as flower, fleet_at(tmp_path / "http", goal=3) as http:
        bad = [upload(flower, number, HOSTILE[name][1]) for number, name in ((3, NAN), (4, "a rule missing"))]
        good = [upload(flower, number, updates[number], ids[number]) for number in (2, 0, 1)]
        told = metrics(RulesStrategy(flower), bad[0], *good, bad[1])
        assert told == {"version": 2, "accepted": 3, "not_finite": 1, "wrong_names": 1}
        assert dict(refusals(flower)) == {"not_finite": 1, "wrong_names": 1}
        with endpoint_of(http) as url:
            for number in range(3):
                with Caller(url, number, http.clock) as caller:
                    assert caller.put(ids[number], body_of(updates[number])).status_code == 201
        assert digest_of(flower, 2) == digest_of(http, 2) != digest_of(http, 1)


@pytest.mark.parametrize("name", HOSTILE)
def test_every_hostile_body_gets_the_code_that_http_gives(fleet, strategy, name):
    code, body = HOSTILE[name]
    assert metrics(strategy, upload(fleet, 0, body)) == {"version": 1, code: 1}
    assert pending(fleet) == []


def test_an_update_that_came_both_ways_counts_once(fleet, strategy):
    update_id, update = new_update_id(fleet.clock()), update_of()
    send(fleet, device_of(fleet, 0), update, update_id)
    assert metrics(strategy, upload(fleet, 0, update, update_id)) == {"version": 1, "duplicate": 1}
    other = upload(fleet, 0, update_of(1), update_id)
    assert metrics(strategy, other) == {"version": 1, "id_reused": 1}
    assert pending(fleet) == [update_id]


def test_an_upload_needs_the_signature_of_an_enrolled_device_over_this_body_and_this_id(fleet, strategy):
    stranger = upload(fleet, 9, update_of(), node=99)
    now, update_id = fleet.clock(), new_update_id(fleet.clock())
    honest = posted(device_key(0), update_id, GOOD, now)
    moved = dataclasses.replace(honest, update_id=new_update_id(now))
    other = dataclasses.replace(honest, body=body_of(update_of(7)))
    forged = [message_of(reply(letter, 1), 11, now) for letter in (moved, other)]
    assert metrics(strategy, stranger, *forged) == {"version": 1, "bad_signature": 2, "digest_mismatch": 1}
    assert pending(fleet) == []


def test_a_signature_is_as_old_as_the_reply_and_not_as_the_wait_for_the_slowest_device(fleet, strategy):
    early, wrong = upload(fleet, 0, update_of()), upload(fleet, 1, update_of(1))
    wrong.metadata.created_at += 301
    fleet.clock.now += 3000
    assert metrics(strategy, early, wrong) == {"version": 1, "accepted": 1, "clock_skew": 1}


def test_a_revoked_device_is_refused(fleet, strategy):
    intake.revoke(fleet, device_of(fleet, 0).id)
    assert metrics(strategy, upload(fleet, 0, update_of())) == {"version": 1, "revoked": 1}


def test_replies_that_are_none_are_dropped(fleet, strategy):
    now = fleet.clock()
    failed = message_of(None, 11, now, Error(1, "the app raised"))
    empty = message_of(RecordDict(), 22, now)
    arrays = message_of(RecordDict({RECORD: ArrayRecord([np.ones(3)])}), 33, now)
    partial = message_of(RecordDict({RECORD: ConfigRecord({"update_id": "x", "body": "text"})}), 44, now)
    waiting = message_of(reply(None, 1), 55, now)
    told = metrics(strategy, failed, empty, arrays, partial, waiting)
    assert told == {"version": 1, "failed": 1, "malformed": 3, "nothing": 1}


def test_a_round_begins_with_the_nodes_that_are_there(strategy):
    letters = list(strategy.configure_train(1, ArrayRecord(), ConfigRecord(), Grid((33, 11))))
    assert [letter.metadata.dst_node_id for letter in letters] == [11, 33]
    assert list(strategy.configure_train(2, ArrayRecord(), ConfigRecord(), Grid(()))) == []


def test_a_letter_tells_a_node_what_became_of_its_own_upload_alone(fleet, strategy):
    update_id = new_update_id(fleet.clock())
    metrics(strategy, upload(fleet, 0, update_of(), update_id), upload(fleet, 1, HOSTILE[NAN][1]))
    first, second = strategy.configure_evaluate(1, ArrayRecord(), ConfigRecord(), Grid())
    put = f"PUT {upload_path('p', update_id)}"
    assert answers_in(first)[put].status == 201
    assert put not in answers_in(second)
    (refused,) = [answer for asked, answer in answers_in(second).items() if asked.startswith("PUT")]
    assert (refused.status, json.loads(refused.body)["code"]) == (422, "not_finite")


def test_a_paused_population_asks_for_nothing_and_a_device_keeps_its_update(fleet, strategy, tmp_path):
    rounds.pause(fleet)
    told = metrics(strategy, upload(fleet, 0, update_of()))
    assert told == {"version": 1, "paused": 1}
    (letter,) = strategy.configure_train(2, ArrayRecord(), ConfigRecord(), Grid((11,)))
    terms = answers_in(letter)["POST /v1/populations/p/check-in"]
    assert json.loads(terms.body)["participate"] is False


class Phone:
    """A device whose contacts are letters."""

    def __init__(self, fleet, folder: Path, index: int) -> None:
        self.device, self.clock, self.index = Device(folder, 1), fleet.clock, index
        self.device.record(SessionKey("", "anna"), (0,) * 700)
        with endpoint_of(fleet) as url:
            ask = Endpoint(url, self.device.key, fleet.clock).ask
            joined(self.device, Invitation(url, "p", intake.new_token(fleet)), ask)

    def answer(self, letter: Message) -> Message:
        """The reply to a letter."""
        mailbox = Mailbox(answers_in(letter), self.device.key, self.clock)
        settings = SyncSettings(least_tokens=8, encoding="f32")
        part = Correspondent(self.device, "p", TinyModel(), mailbox, self.clock, settings, learning(self.index))
        return message_of(reply(*exchange(part, mailbox)), letter.metadata.dst_node_id, self.clock())


def ask(strategy: RulesStrategy, phones: dict[int, Phone]) -> dict[str, int]:
    """The half of a round that asks for updates."""
    letters = strategy.configure_train(1, ArrayRecord(), ConfigRecord(), Grid(tuple(phones)))
    return metrics(strategy, *(phones[letter.metadata.dst_node_id].answer(letter) for letter in letters))


def tell(strategy: RulesStrategy, phones: dict[int, Phone]) -> dict[str, int]:
    """The half of a round that brings fates and rules."""
    letters = strategy.configure_evaluate(1, ArrayRecord(), ConfigRecord(), Grid(tuple(phones)))
    replies = [phones[letter.metadata.dst_node_id].answer(letter) for letter in letters]
    return dict(strategy.aggregate_evaluate(1, replies))


@pytest.fixture(name="phones")
def phones_fixture(fleet, tmp_path):
    phones = {node: Phone(fleet, tmp_path / f"phone{node}", index) for index, node in enumerate((11, 22))}
    yield phones
    for phone in phones.values():
        phone.device.close()


def test_devices_train_send_and_take_new_rules_by_letters_alone(tmp_path):
    with fleet_at(tmp_path / "fleet", goal=2) as fleet:
        strategy = RulesStrategy(fleet)
        phones = {node: Phone(fleet, tmp_path / f"phone{node}", index) for index, node in enumerate((11, 22))}
        for number in (1, 2, 3):
            fleet.clock.now += 1
            assert ask(strategy, phones) == {"version": number + 1, "accepted": 2}
            assert tell(strategy, phones) == {"devices": 2, "current": 2}
        moved = rules_now(fleet) - rules_now(fleet, 1)
        np.testing.assert_allclose(moved[:3], [0.015, 0.015, 0.0], atol=1e-6)
        for phone in phones.values():
            assert phone.device.outbox.counts()["accepted"] == 3
            phone.device.close()


def test_an_update_whose_fate_was_lost_travels_again_and_counts_once(fleet, phones):
    phones.pop(22).device.close()
    first = RulesStrategy(fleet)
    assert ask(first, phones)["accepted"] == 1
    assert ask(RulesStrategy(fleet), phones) == {"version": 1, "duplicate": 1}
    assert len(pending(fleet)) == 1


def test_a_device_that_is_not_enrolled_says_so(fleet, tmp_path):
    device = Device(tmp_path / "new", 1)
    mailbox = Mailbox({}, device.key, fleet.clock)
    with pytest.raises(SyncError, match="not enrolled"):
        Correspondent(device, "p", TinyModel(), mailbox, fleet.clock)
    device.close()


def test_rules_that_the_fleet_did_not_sign_are_not_taken(fleet, strategy, phones):
    phone = phones[11]
    (letter,) = strategy.configure_train(1, ArrayRecord(), ConfigRecord(), Grid((11,)))
    answers = answers_in(letter)
    asked = "GET /v1/populations/p/rules/1"
    answers[asked] = dataclasses.replace(answers[asked], body=answers[asked].body[:-1] + b"\x01")
    mailbox = Mailbox(answers, phone.device.key, fleet.clock)
    part = Correspondent(phone.device, "p", TinyModel(), mailbox, fleet.clock)
    with pytest.raises(Exception, match="not those that the manifest promises"):
        exchange(part, mailbox)
    assert part.version == 0


def test_a_device_whose_server_syncs_already_leaves_its_folder_alone(fleet, phones):
    device = phones[11].device
    with (
        device.only_agent(),
        pytest.raises(SyncError, match="Another process syncs"),
        opened({"device": device.folder}),
    ):
        raise AssertionError("two agents use one folder")


@pytest.mark.parametrize("program", ["flower-superlink", "flower-supernode", "flwr"])
def test_a_documented_command_of_flower_has_its_options(program):
    lines = [line for line in PAGE.replace("\\\n", "").splitlines() if line.startswith(program)]
    assert lines
    help_of = [PROGRAMS / program, *["run"] * (program == "flwr"), "--help"]
    text = subprocess.run(
        help_of, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"}
    ).stdout
    assert [option for line in lines for option in re.findall(r" (--[a-z-]+)", line) if option not in text] == []


def test_a_superlink_and_two_supernodes_end_with_the_bytes_that_http_gives():
    program = ROOT / "benchmarks/flower_parity.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout)
    assert (told["rounds"], told["updates"], told["same"]) == (3, 6, True)
