"""A fleet on a small schema with a clock of its own, and devices that talk to an endpoint over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from updates import RULES, body_of, one_hot

from fednl_runtime.fed_sync.fleet import intake
from fednl_runtime.fed_sync.fleet.blobs import DiskBlobs
from fednl_runtime.fed_sync.fleet.policy import Policy
from fednl_runtime.fed_sync.fleet.population import Fleet, found, read_rules, schema_of
from fednl_runtime.fed_sync.fleet.repository import Repository
from fednl_runtime.fed_sync.fleet.tables import Device
from fednl_runtime.fed_sync.signing import key_file, public_text, sign_request
from fednl_runtime.fed_sync.update import MEDIA_TYPE, ClientUpdate, Vector, new_update_id
from fednl_runtime.rules import RuleSet

START = 1_800_000_000.0


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, now: float = START) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def fleet_in(folder: Path, policy: Policy, clock: Clock | None = None, rules: RuleSet | None = RULES) -> Fleet:
    """A founded fleet whose rows and files are in a folder."""
    repository = Repository(f"sqlite:///{folder / 'fleet.db'}")
    fleet = Fleet("p", repository, DiskBlobs(folder / "blobs"), key_file(folder / "signing.key"), clock or Clock())
    found(fleet, rules, policy)
    return fleet


@contextmanager
def fleet_of(folder: Path, **settings: Any) -> Iterator[Fleet]:
    """A fleet with some settings, closed at the end; one that closes only when told unless `goal` is given."""
    fleet = fleet_in(folder, Policy(**{"goal": 1000, "minimum": 1, **settings}))
    try:
        yield fleet
    finally:
        fleet.repository.close()


def device_key(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "little"))


def join(fleet: Fleet, number: int) -> Device:
    """An enrolled device."""
    return intake.enrol(fleet, intake.new_token(fleet), device_key(number).public_key())


def join_all(fleet: Fleet, count: int) -> list[Device]:
    return [join(fleet, number) for number in range(count)]


def send(fleet: Fleet, device: Device, update: ClientUpdate | bytes, update_id: str = "") -> intake.Receipt:
    """What a device gets for an update."""
    body = update if isinstance(update, bytes) else body_of(update)
    return intake.receive(fleet, device, update_id or new_update_id(fleet.clock()), body)


def current(fleet: Fleet) -> int:
    with fleet.repository.read() as records:
        return records.population(fleet.population).current


def rules_now(fleet: Fleet, number: int = 0) -> Vector:
    """The current rules, or those of a version, as a vector."""
    with fleet.repository.read() as records:
        population = records.population(fleet.population)
        version = records.version(fleet.population, number or population.current)
    return schema_of(population).vector(read_rules(fleet, version))


def play_round(fleet: Fleet, devices: list[Device], value: float = 0.01) -> None:
    """Each device sends a one-hot update from the current version."""
    for index, device in enumerate(devices):
        send(fleet, device, one_hot(index, value, base_version=current(fleet)))


class Caller:
    """A device that calls an endpoint over HTTP with signed requests."""

    def __init__(self, url: str, number: int, clock: Clock, population: str = "p") -> None:
        self.key, self.clock, self.population = device_key(number), clock, population
        self.http = httpx.Client(base_url=url, timeout=30)

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def call(self, method: str, path: str, body: bytes | None = None, **headers: str) -> httpx.Response:
        """Send a signed request."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = self.http.build_request(method, path, content=body, headers=named)
        sign_request(request, self.key, body, self.clock())
        return self.http.send(request)

    def json(self, method: str, path: str, **fields: Any) -> httpx.Response:
        """Send fields as signed JSON."""
        return self.call(method, path, json.dumps(fields).encode(), content_type="application/json")

    def enrol(self, token: str) -> httpx.Response:
        return self.json("POST", "/v1/devices", token=token, public_key=public_text(self.key.public_key()))

    def put(self, update_id: str, body: bytes, content_type: str = MEDIA_TYPE) -> httpx.Response:
        return self.call("PUT", self.path(f"updates/{update_id}"), body, content_type=content_type)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.call("GET", self.path(path), **headers)

    def path(self, path: str) -> str:
        return f"/v1/populations/{self.population}/{path}"
