"""Devices at the server: enrolment, keys, check-ins, and updates that count once however often they are sent."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fednl_runtime.crash import crash_point
from fednl_runtime.fed_sync.errors import PolicyError, Refusal
from fednl_runtime.fed_sync.fleet.policy import Policy, agent_version
from fednl_runtime.fed_sync.fleet.population import Fleet, bases_of, bounds_of
from fednl_runtime.fed_sync.fleet.repository import Records
from fednl_runtime.fed_sync.fleet.rounds import tick_safely
from fednl_runtime.fed_sync.fleet.tables import Device, Population, Token, Update
from fednl_runtime.fed_sync.signing import key_id, public_key, public_text, verify_text
from fednl_runtime.fed_sync.update import ClientUpdate
from fednl_runtime.fed_sync.validate import ID, check_id, check_update, wrong_base

TOKEN_S = 7 * 86_400
"""Seconds for which an enrolment token holds."""


@dataclasses.dataclass(frozen=True)
class Receipt:
    """What became of an update so far."""

    update_id: str
    status: str
    base_version: int
    target: int
    """The version that the update is in, or will be."""
    current_version: int
    duplicate: bool = False
    """Whether this very update had been accepted before."""


def new_token(fleet: Fleet, seconds: float = TOKEN_S) -> str:
    """A secret with which one device may enrol; only its digest is kept."""
    token = f"fednl_{secrets.token_urlsafe(24)}"
    with fleet.repository.write(fleet.population) as records:
        records.add(Token(_digest(token), fleet.population, fleet.clock() + seconds))
    return token


def enrol(fleet: Fleet, token: str, key: Ed25519PublicKey) -> Device:
    """Make a device of who holds a token and a key; once more with both gives the same device.

    Raises:
        Refusal: `bad_token` if it is unknown, expired or used by another key; `revoked`.
    """
    with fleet.repository.write(fleet.population) as records:
        known, now = records.device_of_key(key_id(key)), fleet.clock()
        granted = records.token(_digest(token))
        if granted is None or granted.population != fleet.population:
            raise Refusal("bad_token", "The enrolment token is unknown. Ask the operator for a new one.")
        if known is not None and granted.device == known.id:
            return _active(known)
        if granted.device is not None or granted.expires < now or known is not None:
            raise Refusal("bad_token", "The enrolment token is used or expired. Ask the operator for a new one.")
        name = f"dev_{secrets.token_hex(16)}"
        device = Device(name, fleet.population, key_id(key), public_text(key), "active", now, now)
        records.add(device)
        records.use_token(granted.sha256, device.id)
        return device


def rotation_text(device_id: str, new_key: str) -> str:
    """What the new key signs to show that the device holds it."""
    return f"fednl-rotate {device_id} {new_key}"


def rotate(fleet: Fleet, device: Device, new_key: str, proof: str) -> Device:
    """Give a device a new key, which signed `rotation_text`; its present key may be given once more.

    Raises:
        Refusal: `bad_key`, `bad_signature` for the proof, or `key_in_use` by another device.
    """
    key = public_key(new_key)
    verify_text(rotation_text(device.id, new_key), proof, key)
    with fleet.repository.write(fleet.population) as records:
        holder = records.device_of_key(key_id(key))
        if holder is not None and holder.id != device.id:
            raise Refusal("key_in_use", "Another device has this key. Make a new one.")
        records.change_device(device.id, key_id=key_id(key), public_key=public_text(key))
        return dataclasses.replace(device, key_id=key_id(key), public_key=public_text(key))


def revoke(fleet: Fleet, device_id: str) -> None:
    """Refuse a device from now on; what it sent and still waits expires. Raises Refusal `unknown_device`."""
    with fleet.repository.write(fleet.population) as records:
        if records.device(device_id) is None:
            raise Refusal("unknown_device", "No device of that name is enrolled. List them with `aggregator devices`.")
        records.change_device(device_id, status="revoked")
        for update in records.pending(fleet.population):
            if update.device == device_id:
                records.settle(update.id, "expired", update.target)


def device_of(fleet: Fleet, key: str) -> Device:
    """The active device of a key id. Raises Refusal `bad_signature` or `revoked`."""
    with fleet.repository.read() as records:
        device = records.device_of_key(key)
    if device is None or device.population != fleet.population:
        raise Refusal("bad_signature", "The key of the request belongs to no device. Enrol it first.")
    return _active(device)


def _active(device: Device) -> Device:
    if device.status != "active":
        raise Refusal("revoked", "This device was taken out of the fleet. It keeps its rules and stops sending.")
    return device


def check_in(fleet: Fleet, device: Device, base_version: int, schema: str, agent: str) -> dict[str, object]:
    """What the server expects of a device that has the rules of `base_version`."""
    with fleet.repository.write(fleet.population) as records:
        population = records.population(fleet.population)
        policy = Policy.from_json(population.policy)
        records.change_device(device.id, seen=fleet.clock())
        reason = _why_not(records, population, policy, device, base_version, schema, agent)
    bounds = bounds_of(population, policy)
    return {
        "participate": reason is None,
        "reason": reason,
        "current_version": population.current,
        "target": population.target,
        "deadline": int(population.deadline),
        "clip_norm": policy.clip_norm,
        "sigma": policy.sigma,
        "max_tokens": policy.max_tokens,
        "max_bytes": bounds.max_bytes,
    }


def _why_not(
    records: Records, population: Population, policy: Policy, device: Device, base: int, schema: str, agent: str
) -> str | None:
    if population.paused:
        return "paused"
    if _too_old(agent, policy):
        return "agent_too_old"
    if schema != population.schema:
        return "wrong_schema"
    if base not in bases_of(records, population, policy):
        return "stale_base"
    voted = records.vote(population.name, device.id, base, population.target)
    return "device_already_contributed" if voted else None


def _too_old(agent: str, policy: Policy) -> bool:
    try:
        return agent_version(agent) < agent_version(policy.min_agent)
    except PolicyError:
        return True


def receive(fleet: Fleet, device: Device, update_id: str, body: bytes) -> Receipt:
    """Accept an update, once: the same bytes under the same id are answered as before.

    Raises:
        Refusal: as `check_id` and `check_update` do, or `id_reused`, `paused`, `agent_too_old`,
            `device_already_contributed`.
    """
    digest = hashlib.sha256(body).hexdigest()
    with fleet.repository.read() as records:
        population = records.population(fleet.population)
        policy = Policy.from_json(population.policy)
        known = records.update(check_id(update_id, fleet.clock()))
        bases = bases_of(records, population, policy)
    if known is not None:
        return _repeated(known, device, digest, population)
    update, _ = check_update(body, bounds_of(population, policy), bases, population.current)
    if _too_old(update.agent_version, policy):
        raise Refusal("agent_too_old", f"The agent is older than {policy.min_agent}. Upgrade fednl-runtime.")
    crash_point("update.before_blob")
    fleet.blobs.put(body)
    crash_point("update.after_blob")
    receipt = _accept(fleet, device, update_id, update, digest)
    crash_point("update.after_commit")
    tick_safely(fleet)
    return receipt


def _accept(fleet: Fleet, device: Device, update_id: str, update: ClientUpdate, digest: str) -> Receipt:
    """Add the update to the open round, whatever happened since it was checked."""
    with fleet.repository.write(fleet.population) as records:
        population = records.population(fleet.population)
        policy = Policy.from_json(population.policy)
        known, base = records.update(update_id), update.base_version
        if known is not None:
            return _repeated(known, device, digest, population)
        if population.paused:
            raise Refusal("paused", "The population takes no updates now. Keep the update and come back later.")
        if base not in bases_of(records, population, policy):
            raise wrong_base(base, population.current)
        if records.vote(population.name, device.id, base, population.target):
            raise Refusal("device_already_contributed", "A device has one vote per version. Wait for the next version.")
        row = Update(
            update_id,
            population.name,
            device.id,
            base,
            population.target,
            digest,
            update.num_tokens,
            "pending",
            fleet.clock(),
        )
        records.add(row)
        crash_point("update.before_commit")
    return _receipt(row, population)


def _repeated(known: Update, device: Device, digest: str, population: Population) -> Receipt:
    if known.device != device.id or known.sha256 != digest:
        raise Refusal("id_reused", "Another update has this id. Make a new id for each update.")
    return dataclasses.replace(_receipt(known, population), duplicate=True)


def _receipt(update: Update, population: Population) -> Receipt:
    return Receipt(update.id, update.status, update.base_version, update.target, population.current)


def fate(fleet: Fleet, device: Device, update_id: str) -> tuple[Receipt | None, str | None]:
    """The receipt of an update of this device, or the code with which it was refused.

    Raises:
        Refusal: as `check_id` does, or `unknown_update`; it may be sent again.
    """
    check_id(update_id, fleet.clock())
    with fleet.repository.read() as records:
        update, population = records.update(update_id), records.population(fleet.population)
        code = records.refusal(device.id, update_id)
    if update is not None and update.device == device.id:
        return _receipt(update, population), None
    if code is None:
        raise Refusal("unknown_update", "No update of this id is kept. Send it, or send it again.")
    return None, code


def note_refusal(fleet: Fleet, device: Device, update_id: str, code: str) -> None:
    """Count a refused upload of a device."""
    with fleet.repository.write(fleet.population) as records:
        records.refuse(device.id, code, update_id if ID.fullmatch(update_id) else "", fleet.clock())


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
