"""What the endpoint answers on each route: who may ask, what is read, what is said."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import re
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import URL
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fednl_runtime.fed_sync.errors import Refusal
from fednl_runtime.fed_sync.fleet import intake, rounds, view
from fednl_runtime.fed_sync.fleet.metrics import Traffic
from fednl_runtime.fed_sync.fleet.policy import Policy
from fednl_runtime.fed_sync.fleet.population import Fleet, bounds_of, next_sync
from fednl_runtime.fed_sync.fleet.reading import Addressed, body_of, cached, fields_of
from fednl_runtime.fed_sync.fleet.tables import Device
from fednl_runtime.fed_sync.signing import key_id, public_key, public_text, verify_request
from fednl_runtime.fed_sync.validate import check_digest, check_type

MAX_JSON = 1 << 14
"""Bytes of the largest body of JSON."""
RULES_TYPE = "application/vnd.fednl.rules+safetensors"
MANIFEST_TYPE = "application/vnd.dsse+json"
ACTIONS: Mapping[str, tuple[str, Callable[..., object]]] = {
    "pause": ("", rounds.pause),
    "resume": ("", rounds.resume),
    "publish": ("", rounds.publish_now),
    "rollback": ("to", rounds.rollback),
    "release": ("version", rounds.release),
}
"""What an operator can do: the field that the body has, and the function."""


class Resources:
    """What a fleet serves, and what its routes have in common."""

    def __init__(self, fleet: Fleet, admin_token: str | None, public_url: str | None) -> None:
        self.fleet, self.traffic = fleet, Traffic(fleet)
        self._admin_token, self._public_url = admin_token, public_url
        self.pace = self.look()

    def look(self) -> dict[str, int]:
        """When devices should come again, as things are now."""
        with self.fleet.repository.read() as records:
            population = records.population(self.fleet.population)
            devices = records.count_devices(self.fleet.population)
        return next_sync(population, Policy.from_json(population.policy), devices)

    def answer(self, body: Mapping[str, Any], status: int = 200) -> Response:
        """A JSON object that ends with the time to come again."""
        return JSONResponse({**body, "next_sync": self.pace}, status)

    def require_population(self, request: Request) -> None:
        """Raise Refusal `unknown_population` unless the path names ours."""
        if request.path_params["population"] != self.fleet.population:
            raise Refusal("unknown_population", "No population of that name is kept here. Check the address.")

    def require_admin(self, request: Request) -> None:
        """Raise Refusal `bad_admin_token` unless the request has the admin token."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        known = (self._admin_token or "").encode()
        if not known or scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode("latin-1"), known):
            raise Refusal("bad_admin_token", "This needs the admin token of the server as Authorization: Bearer.")

    def addressed(self, request: Request) -> Addressed:
        """The request as its sender signed it: behind a proxy under the public address."""
        url = request.url
        if self._public_url is not None:
            public = URL(self._public_url)
            url = url.replace(scheme=public.scheme, netloc=public.netloc)
        return Addressed(request.method, str(url), request.headers)

    async def device(self, request: Request, has_body: bool) -> Device:
        """The device that signed a request. Raises Refusal."""
        return await run_in_threadpool(self._device, request, has_body)

    def _device(self, request: Request, has_body: bool) -> Device:
        key = verify_request(self.addressed(request), self._key, has_body, self.fleet.clock())
        return intake.device_of(self.fleet, key)

    def _key(self, name: str) -> Any:
        with self.fleet.repository.read() as records:
            device = records.device_of_key(name)
        return None if device is None else public_key(device.public_key)

    async def enrol(self, request: Request) -> Response:
        """POST /v1/devices"""
        body = await body_of(request, MAX_JSON)
        fields = fields_of(request, body, token=str, public_key=str)
        key = public_key(fields["public_key"])
        verify_request(self.addressed(request), {key_id(key): key}.get, True, self.fleet.clock())
        check_digest(request.headers.get("content-digest", ""), body)
        known = await run_in_threadpool(self._key, key_id(key))
        device = await run_in_threadpool(intake.enrol, self.fleet, fields["token"], key)
        facts = {"device_id": device.id, "population": device.population}
        facts["manifest_key"] = public_text(self.fleet.key.public_key())
        return self.answer(facts, 200 if known else 201)

    async def signed_json(self, request: Request, **kinds: type) -> tuple[Device, dict[str, Any]]:
        """The sender and the fields of a signed request."""
        device = await self.device(request, has_body=True)
        body = await body_of(request, MAX_JSON)
        check_digest(request.headers.get("content-digest", ""), body)
        return device, fields_of(request, body, **kinds)

    async def rotate(self, request: Request) -> Response:
        """PUT /v1/devices/self/key"""
        device, fields = await self.signed_json(request, public_key=str, proof=str)
        device = await run_in_threadpool(intake.rotate, self.fleet, device, fields["public_key"], fields["proof"])
        return self.answer({"device_id": device.id, "key_id": device.key_id})

    async def check_in(self, request: Request) -> Response:
        """POST /v1/populations/{population}/check-in"""
        self.require_population(request)
        device, fields = await self.signed_json(request, base_version=int, schema=str, agent_version=str)
        return self.answer(await run_in_threadpool(intake.check_in, self.fleet, device, *fields.values()))

    async def current(self, request: Request) -> Response:
        """GET /v1/populations/{population}/rules/current"""
        self.require_population(request)
        await self.device(request, has_body=False)
        return await run_in_threadpool(self._current, request)

    def _current(self, request: Request) -> Response:
        with self.fleet.repository.read() as records:
            population = records.population(self.fleet.population)
            manifest = records.version(self.fleet.population, population.current).manifest
        assert manifest is not None, "a current version is published, and that signs it"
        data = manifest.encode()
        return cached(request, data, hashlib.sha256(data).hexdigest(), MANIFEST_TYPE, "no-cache")

    async def rules(self, request: Request) -> Response:
        """GET /v1/populations/{population}/rules/{version}"""
        self.require_population(request)
        await self.device(request, has_body=False)
        return await run_in_threadpool(self._rules, request)

    def _rules(self, request: Request) -> Response:
        text = request.path_params["version"]
        if not re.fullmatch(r"[1-9][0-9]{0,8}", text):
            raise Refusal("unknown_version", "A version is a number from 1. Ask for the current one.")
        with self.fleet.repository.read() as records:
            version = records.version(self.fleet.population, int(text))
        if version.state == "withdrawn":
            raise Refusal("withdrawn", f"Version {text} was taken back. Ask for the current one.")
        if version.state != "published":
            raise Refusal("unknown_version", f"Version {text} was never published. Ask for the current one.")
        data = self.fleet.blobs.get(version.sha256)
        return cached(request, data, version.sha256, RULES_TYPE, "private, max-age=31536000, immutable")

    async def put_update(self, request: Request) -> Response:
        """PUT /v1/populations/{population}/updates/{update_id}"""
        self.require_population(request)
        device, update_id = await self.device(request, has_body=True), request.path_params["update_id"]
        try:
            check_type(request.headers.get("content-type", ""))
            body = await body_of(request, await run_in_threadpool(self._max_bytes))
            check_digest(request.headers.get("content-digest", ""), body)
            receipt = await run_in_threadpool(intake.receive, self.fleet, device, update_id, body)
        except Refusal as refusal:
            await run_in_threadpool(intake.note_refusal, self.fleet, device, update_id, refusal.code)
            raise
        return self.answer(dataclasses.asdict(receipt), 200 if receipt.duplicate else 201)

    def _max_bytes(self) -> int:
        with self.fleet.repository.read() as records:
            population = records.population(self.fleet.population)
        return bounds_of(population, Policy.from_json(population.policy)).max_bytes

    async def get_update(self, request: Request) -> Response:
        """GET /v1/populations/{population}/updates/{update_id}"""
        self.require_population(request)
        device, update_id = await self.device(request, has_body=False), request.path_params["update_id"]
        receipt, code = await run_in_threadpool(intake.fate, self.fleet, device, update_id)
        if receipt is None:
            return self.answer({"update_id": update_id, "status": "refused", "code": code})
        return self.answer(dataclasses.asdict(receipt))

    async def rounds(self, request: Request) -> Response:
        """GET /v1/populations/{population}/rounds"""
        self.require_population(request)
        await self.device(request, has_body=False)
        return self.answer(await run_in_threadpool(view.rounds, self.fleet))

    async def status(self, request: Request) -> Response:
        """GET /v1/admin/populations/{population}"""
        self.require_admin(request)
        self.require_population(request)
        return self.answer(await run_in_threadpool(view.status, self.fleet))

    async def act(self, request: Request) -> Response:
        """POST /v1/admin/populations/{population}/{action}"""
        self.require_admin(request)
        self.require_population(request)
        if request.path_params["action"] not in ACTIONS:
            raise HTTPException(404, "Not Found")
        field, action = ACTIONS[request.path_params["action"]]
        body = await body_of(request, MAX_JSON)
        arguments = fields_of(request, body, **{field: int}) if field else {}
        await run_in_threadpool(action, self.fleet, *arguments.values())
        self.pace = await run_in_threadpool(self.look)
        return self.answer(await run_in_threadpool(view.status, self.fleet))

    async def revoke(self, request: Request) -> Response:
        """POST /v1/admin/devices/{device_id}/revoke"""
        self.require_admin(request)
        device_id = request.path_params["device_id"]
        await run_in_threadpool(intake.revoke, self.fleet, device_id)
        return self.answer({"device_id": device_id, "status": "revoked"})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics"""
        self.require_admin(request)
        text = await run_in_threadpool(generate_latest, self.traffic.registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def health(self, request: Request) -> Response:
        """GET /health"""
        return self.answer({"status": "ok"})
