"""The agent keeps its schedule; no endpoint and no mistake ends it, harms the device or holds a turn up."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from agents import SETTINGS, Phone, endpoint_of, learning, pending, phone_of
from engines import TOKENIZER, running_engine, until
from fleets import Clock, fleet_of

from fednl_runtime.errors import StoreError
from fednl_runtime.fed_sync.device.agent import Agent
from fednl_runtime.fed_sync.device.conditions import DeviceConditions
from fednl_runtime.fed_sync.device.local_training import StoppedError
from fednl_runtime.fed_sync.device.outbox import Upload
from fednl_runtime.fed_sync.device.schedule import Pace
from fednl_runtime.fed_sync.errors import SyncError
from fednl_runtime.sampling import SamplingParams
from fednl_runtime.turn import TurnRequest

PACE = Pace(interval_s=100, base_s=10, cap_s=400)
NO_CONDITIONS = DeviceConditions(needs_power=False, min_battery=0)


@dataclasses.dataclass
class Obstacle:
    """Conditions that a test sets."""

    why: str | None = None

    def hindrance(self, now: float) -> str | None:
        return self.why


def agent_of(phone: Phone, clock: Clock, conditions=NO_CONDITIONS, pace: Pace = PACE) -> Agent:
    return Agent(phone.part, conditions, pace, clock, random.Random(0))


@pytest.fixture(name="fleet")
def fleet_fixture(tmp_path):
    (tmp_path / "fleet").mkdir()
    with fleet_of(tmp_path / "fleet", sync_s=60.0) as fleet:
        yield fleet


@pytest.fixture(name="url")
def url_fixture(fleet):
    with endpoint_of(fleet) as url:
        yield url


@pytest.fixture(name="phone")
def phone_fixture(fleet, url, tmp_path):
    with phone_of(fleet, url, tmp_path / "phone") as phone:
        yield phone


def test_the_first_contact_is_spread_and_the_next_one_is_when_the_endpoint_said(fleet, phone):
    agent = agent_of(phone, fleet.clock)
    delay = agent.tick()
    assert 0 < delay < 100
    assert phone.device.enrolment() is None
    fleet.clock.now += delay
    assert 60 <= agent.tick() <= 120
    assert pending(fleet) != []
    status = agent.status()
    assert (status["version"], status["failures"], status["last_success"]) == (1, 0, fleet.clock.now)
    assert status["outbox"]["accepted"] == 1
    assert status["bytes_today"]["up"] > 500


def test_the_schedule_outlives_a_restart(fleet, phone):
    agent = agent_of(phone, fleet.clock)
    agent.flush()
    delay = agent.tick()
    assert agent_of(phone, fleet.clock).tick() == pytest.approx(delay)


@pytest.mark.parametrize("shift", [-1e9, 1e6])
def test_a_clock_that_was_set_over_a_restart_does_not_keep_the_agent_asleep(fleet, phone, shift):
    agent = agent_of(phone, fleet.clock)
    agent.flush()
    agent.tick()
    assert agent_of(phone, Clock(fleet.clock.now + shift)).tick() <= 100


def test_a_clock_set_back_by_years_while_the_agent_runs_does_not_keep_it_asleep(fleet, phone):
    agent = agent_of(phone, fleet.clock)
    agent.flush()
    agent.tick()
    fleet.clock.now -= 1e8
    assert agent.tick() <= 100


def test_flush_comes_before_schedule_and_conditions_but_not_before_a_pause(fleet, phone):
    agent = agent_of(phone, fleet.clock, Obstacle("on battery"))
    agent.pause()
    agent.flush()
    agent.tick()
    assert agent.status()["state"] == "paused"
    assert phone.part.version == 0
    agent.resume()
    agent.tick()
    assert phone.part.version == 1


def test_a_pause_outlives_a_restart(fleet, phone):
    agent_of(phone, fleet.clock).pause()
    again = agent_of(phone, fleet.clock)
    again.flush()
    again.tick()
    assert phone.part.version == 0


def test_a_hindrance_puts_a_contact_off_by_a_time_of_the_devices_own(fleet, phone):
    conditions = Obstacle("quiet hours")
    delays = []
    for seed in range(20):
        agent = Agent(phone.part, conditions, PACE, fleet.clock, random.Random(seed))
        fleet.clock.now += 1000
        delays.append(agent.tick())
    assert 50 <= min(delays) < 60
    assert 90 < max(delays) <= 100
    assert agent.status()["hindrance"] == "quiet hours"
    assert phone.part.version == 0


def test_when_the_bytes_of_the_day_are_spent_the_agent_waits_for_the_next(fleet, url, tmp_path):
    settings = dataclasses.replace(SETTINGS, bytes_per_day=10_000)
    with phone_of(fleet, url, tmp_path / "phone", settings=settings) as phone:
        phone.device.notes.spend(fleet.clock.now, 4_000, 6_000)
        agent = agent_of(phone, fleet.clock)
        fleet.clock.now += 200
        agent.tick()
        assert agent.status()["hindrance"] == "bytes of the day are spent"
        assert phone.part.version == 0
        fleet.clock.now += 86_400
        agent.tick()
        assert phone.part.version == 1


def test_failures_slow_the_agent_down_and_a_success_sets_it_free(fleet, phone, url):
    agent = agent_of(phone, fleet.clock)
    phone.part._endpoint.url = "http://127.0.0.1:1"
    delays = []
    for _ in range(7):
        agent.flush()
        delays.append(agent.tick())
    assert agent.status()["last_error"]["code"] == "network"
    assert agent.status()["failures"] == 7
    assert min(delays) >= 100
    assert 400 <= delays[-1] <= 800
    phone.part._endpoint.url = url
    agent.flush()
    assert agent.tick() <= 120
    assert (agent.status()["failures"], agent.status()["last_error"]) == (0, None)


def test_a_mistake_of_ours_and_a_full_disk_are_survived(fleet, phone, monkeypatch, caplog):
    agent = agent_of(phone, fleet.clock)
    monkeypatch.setattr(phone.part, "contact", lambda stopped: 1 / 0)
    agent.flush()
    assert agent.tick() >= PACE.permanent_s
    assert agent.status()["last_error"]["code"] == "internal"

    def full(**facts):
        raise StoreError("The disk is full.")

    monkeypatch.setattr(phone.device.notes, "set", full)
    agent.flush()
    assert agent.tick() >= PACE.permanent_s
    monkeypatch.setattr(phone.device.notes, "get", lambda *_: full())
    agent.flush()
    assert agent.tick() > 0
    assert "it goes on" in caplog.text


def test_training_ends_when_the_device_is_unplugged_or_the_agent_paused(fleet, url, tmp_path):
    conditions = Obstacle()

    def train(model, rules, tokens, stopped):
        assert not stopped()
        conditions.why = "on battery"
        assert stopped()
        raise StoppedError

    with phone_of(fleet, url, tmp_path / "phone", train=train) as phone:
        agent = agent_of(phone, fleet.clock, conditions)
        fleet.clock.now += 200
        agent.tick()
        assert agent.status()["hindrance"] == "stopped while training"
        assert phone.device.outbox.fates() == []
        phone.part._train = learning(0)
        conditions.why = None
        fleet.clock.now += 200
        agent.tick()
        assert agent.status()["outbox"]["accepted"] == 1


def test_one_folder_has_one_agent(tmp_path, phone):
    with phone.device.only_agent(), pytest.raises(SyncError, match="already"), phone.device.only_agent():
        pass
    with phone.device.only_agent():
        pass


def test_the_thread_runs_at_low_priority_by_itself_and_ends_when_told(fleet, phone):
    agent = Agent(phone.part, NO_CONDITIONS, Pace(interval_s=0.01, cap_s=0.01))
    agent.start()
    until(lambda: phone.part.version)
    agent.stop()
    assert agent.stopped


def answer(status: str, *headers: str, body: bytes = b"") -> bytes:
    lines = [f"HTTP/1.1 {status}", "connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def hang(link: socket.socket) -> None:
    time.sleep(30)


def drip(link: socket.socket) -> None:
    link.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
    while True:
        link.sendall(b" ")
        time.sleep(0.05)


def drip_headers(link: socket.socket) -> None:
    link.sendall(b"HTTP/1.1 200 OK\r\nx: ")
    while True:
        link.sendall(b"a")
        time.sleep(0.05)


def flood(link: socket.socket) -> None:
    link.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        link.sendall(bytes(1 << 16))


def flood_headers(link: socket.socket) -> None:
    link.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        link.sendall(b"x: " + b"a" * 8000 + b"\r\n")


def reset(link: socket.socket) -> None:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def saying(data: bytes) -> Callable[[socket.socket], None]:
    return lambda link: link.sendall(data)


EVIL: dict[str, tuple[str, Callable[[socket.socket], None]]] = {
    "hangs": ("timeout", hang),
    "drips its body": ("timeout", drip),
    "drips its headers": ("timeout", drip_headers),
    "floods": ("bad_answer", flood),
    "floods headers": ("network", flood_headers),
    "resets": ("network", reset),
    "closes": ("network", lambda link: None),
    "says garbage": ("network", saying(b"\x16\x03\x01 garbage \0\xff\r\n\r\n")),
    "says another protocol": ("network", saying(b"220 ESMTP ready\r\n")),
    "fails": ("http_500", saying(answer("500 Broken", "content-length: 0"))),
    "is overloaded": ("http_503", saying(answer("503 Busy", "retry-after: 5000", "content-length: 0"))),
    "limits": ("http_429", saying(answer("429 Slow down", "retry-after: 5000", "content-length: 0"))),
    "limits for ever": ("http_429", saying(answer("429 Slow down", "retry-after: 99999999999", "content-length: 0"))),
    "redirects": ("http_302", saying(answer("302 Found", "location: http://127.0.0.1:1/", "content-length: 0"))),
    "says too little": ("network", saying(answer("200 OK", "content-length: 500", body=b"{}"))),
    "says a length that is none": ("network", saying(answer("200 OK", "content-length: -7", body=b"{}"))),
    "has two lengths": ("network", saying(answer("200 OK", "content-length: 2", "content-length: 3", body=b"{}"))),
    "promises gigabytes": ("network", saying(answer("200 OK", "content-length: 99999999999", body=b"{}"))),
    "cuts its chunks": ("network", saying(answer("200 OK", "transfer-encoding: chunked", body=b"fffff\r\n{}"))),
    "compresses a bomb": (
        "bad_answer",
        saying(answer("200 OK", "content-encoding: gzip", body=gzip.compress(bytes(10 << 20)))),
    ),
    "shows a page": ("bad_answer", saying(answer("200 OK", "content-type: text/html", body=b"<h1>Welcome</h1>"))),
    "answers with a list": ("bad_answer", saying(answer("200 OK", body=b"[1, 2]"))),
    "answers deeply": ("bad_answer", saying(answer("200 OK", body=b"[" * 100_000))),
    "answers with nothing": ("http_204", saying(answer("204 No Content"))),
    "asks for a login": ("http_401", saying(answer("401 Unauthorized", "date: yesterday", "content-length: 0"))),
    "refuses oddly": ("http_418", saying(answer("418 Teapot", body=b'{"code": 7'))),
    "knows nothing": ("http_404", saying(answer("404 Not Found", "content-length: 0"))),
}


@contextlib.contextmanager
def server(behave: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a server that reads a request and then behaves in its own way."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    link, _ = listening.accept()
                    threading.Thread(target=attend, args=(link,), daemon=True).start()

        def attend(link: socket.socket) -> None:
            with link, contextlib.suppress(OSError):
                link.recv(1 << 16)
                behave(link)
                if behave is not reset:
                    link.shutdown(socket.SHUT_WR)
                    while link.recv(1 << 16):
                        pass

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("what", EVIL)
def test_an_evil_endpoint_costs_one_bounded_failure_and_nothing_else(fleet, url, tmp_path, what, caplog):
    code, behave = EVIL[what]
    with phone_of(fleet, url, tmp_path / "phone", request_s=1.0) as phone:
        phone.contact()
        used, version = len(phone.used), phone.part.version
        phone.device.outbox.put(Upload("u", 1, 5, b"body", fleet.clock.now), phone.part.schema.hash, {}, [])
        agent = agent_of(phone, fleet.clock)
        with server(behave) as evil:
            phone.part._endpoint.url = evil
            agent.flush()
            start = time.monotonic()
            delay = agent.tick()
            assert time.monotonic() - start < 5
        status = agent.status()
        assert status["last_error"]["code"] == code
        assert delay >= PACE.interval_s
        assert (len(phone.used), phone.part.version) == (used, version)
        assert status["outbox"]["sent"] == 1
        assert status["bytes_today"]["down"] < 2_000_000
        assert "Traceback" not in caplog.text


def test_an_endpoint_that_hangs_holds_up_no_turn_and_no_shutdown(tmp_path, fleet):
    with server(hang) as url, running_engine() as engine:
        phone = Phone(tmp_path / "phone", url, time.time, "a token")
        agent = Agent(phone.part, NO_CONDITIONS, Pace(interval_s=0.01, cap_s=0.01))
        agent.start()
        until(lambda: agent.status()["state"] == "syncing")
        request = TurnRequest(tuple(TOKENIZER.encode("hello")), SamplingParams(max_tokens=5), "anna")
        start = time.monotonic()
        list(engine.turn(request))
        assert agent.status()["state"] == "syncing"
        agent.stop(0.2)
        assert time.monotonic() - start < 5
    assert not agent.stopped


def test_an_update_cut_off_on_its_way_is_sent_again_and_counts_once(fleet, url, tmp_path):
    with phone_of(fleet, url, tmp_path / "phone") as phone:
        phone.part._send = lambda *_: None
        phone.contact()
        del phone.part._send
        with server(lambda link: None) as evil:
            phone.part._endpoint.url = evil
            agent = agent_of(phone, fleet.clock)
            agent.flush()
            agent.tick()
        phone.part._endpoint.url = url
        agent.flush()
        agent.tick()
        assert len(pending(fleet)) == agent.status()["outbox"]["accepted"] == 1
