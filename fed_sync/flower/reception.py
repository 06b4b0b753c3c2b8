"""Where uploads by letter arrive: the checks and the intake that HTTP uploads go through."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from flwr.app import Message
from starlette.datastructures import Headers

from fednl_runtime.errors import FednlError
from fednl_runtime.fed_sync.errors import Refusal
from fednl_runtime.fed_sync.fleet import intake
from fednl_runtime.fed_sync.fleet.policy import Policy
from fednl_runtime.fed_sync.fleet.population import Fleet, bounds_of
from fednl_runtime.fed_sync.fleet.problems import STATUSES
from fednl_runtime.fed_sync.fleet.reading import Addressed
from fednl_runtime.fed_sync.fleet.tables import Device
from fednl_runtime.fed_sync.flower.letters import ADDRESS, Answered, Posted, posted_in, upload_path
from fednl_runtime.fed_sync.signing import public_key, verify_request
from fednl_runtime.fed_sync.validate import check_digest, check_size, check_type

log = logging.getLogger("fednl_runtime.flower")


def news(fleet: Fleet) -> dict[str, Answered]:
    """The newest rules and their manifest, as answers to the requests that fetch them."""
    with fleet.repository.read() as records:
        population = records.population(fleet.population)
        current = records.version(fleet.population, population.current)
    assert current.manifest is not None, "a current version is published, and that signs it"
    base = f"GET /v1/populations/{fleet.population}/rules"
    return {
        f"{base}/current": Answered(200, current.manifest.encode()),
        f"{base}/{current.version}": Answered(200, fleet.blobs.get(current.sha256)),
    }


def terms(fleet: Fleet) -> dict[str, Answered]:
    """What an update must keep to, as the answer to a check-in; whether it may count is decided when it comes."""
    with fleet.repository.read() as records:
        population = records.population(fleet.population)
    policy = Policy.from_json(population.policy)
    facts = {
        "participate": not population.paused,
        "reason": "paused" if population.paused else None,
        "current_version": population.current,
        "target": population.target,
        "clip_norm": policy.clip_norm,
        "sigma": policy.sigma,
        "max_tokens": policy.max_tokens,
    }
    return {f"POST /v1/populations/{fleet.population}/check-in": Answered(200, _json(facts))}


def take(fleet: Fleet, message: Message) -> tuple[str, dict[str, Answered]]:
    """Take the upload in a reply in; what came of it, and the answer that the device is to get.

    That is `accepted`, `duplicate`, `nothing` where none waits, `failed` where the device's app did, `unavailable`
    where the storage here does not work, or the code of a refusal.

    Refusals are counted under their device, as those over HTTP are. A signature's time is held against the time at
    which the reply was made: replies lie until the slowest device of a round is done, and repeating one is no use.
    """
    if message.has_error():
        log.warning("the app of node %d failed: %s", message.metadata.src_node_id, message.error.reason)
        return "failed", {}
    try:
        posted = posted_in(message)
        if posted is None:
            return "nothing", {}
        device = _sender(fleet, posted, message.metadata.created_at)
    except Refusal as refusal:
        return refusal.code, {}
    except (FednlError, OSError):
        log.exception("a reply could not be read")
        return "unavailable", {}
    asked = f"PUT {upload_path(fleet.population, posted.update_id)}"
    try:
        receipt = _receive(fleet, device, posted)
    except Refusal as refusal:
        intake.note_refusal(fleet, device, posted.update_id, refusal.code)
        about = {"code": refusal.code, "detail": str(refusal), "current_version": refusal.current_version}
        return refusal.code, {asked: Answered(STATUSES[refusal.code], _json(about))}
    except (FednlError, OSError):
        log.exception("an update could not be kept; its device sends it again")
        return "unavailable", {}
    about = {"update_id": receipt.update_id, "status": receipt.status, "target": receipt.target}
    outcome, status = ("duplicate", 200) if receipt.duplicate else ("accepted", 201)
    return outcome, {asked: Answered(status, _json(about))}


def _sender(fleet: Fleet, posted: Posted, made: float) -> Device:
    """The device that signed an upload. Raises Refusal."""

    def known(key_id: str) -> Any:
        with fleet.repository.read() as records:
            device = records.device_of_key(key_id)
        return None if device is None else public_key(device.public_key)

    url = ADDRESS + upload_path(fleet.population, posted.update_id)
    key_id = verify_request(Addressed("PUT", url, Headers(posted.headers)), known, True, made)
    return intake.device_of(fleet, key_id)


def _receive(fleet: Fleet, device: Device, posted: Posted) -> intake.Receipt:
    with fleet.repository.read() as records:
        population = records.population(fleet.population)
    check_type(posted.headers["content-type"])
    check_size(len(posted.body), bounds_of(population, Policy.from_json(population.policy)).max_bytes)
    check_digest(posted.headers["content-digest"], posted.body)
    return intake.receive(fleet, device, posted.update_id, posted.body)


def _json(facts: Mapping[str, object]) -> bytes:
    return json.dumps(facts).encode()
