"""New rules from the endpoint: who signed them, whether they are newer, whole and for this model."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

from fednl_runtime.fed_sync.device.client import Answer, ContactError
from fednl_runtime.fed_sync.errors import Refusal
from fednl_runtime.fed_sync.fleet.policy import agent_version
from fednl_runtime.fed_sync.manifest import Manifest, open_manifest
from fednl_runtime.fed_sync.signing import public_key

MANIFEST_BYTES = 1 << 16
Ask = Callable[..., Answer]
"""`Endpoint.ask`, or what stands before it."""


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a manifest must say to be followed."""

    population: str
    schema: str
    least_version: int
    """The highest version seen so far: an older one is an attempt to bring back what was taken back."""
    manifest_keys: Sequence[str]
    max_bytes: int
    agent_version: str
    now: float


def fetch_manifest(ask: Ask, expected: Expected, etag: str | None) -> tuple[Manifest, str | None] | None:
    """The manifest of the newest version and its ETag; None if it is the one of `etag`.

    Raises:
        ContactError: `bad_manifest`, `expired_manifest`, `old_manifest`, `agent_too_old`, or as asking does.
    """
    path = f"/v1/populations/{expected.population}/rules/current"
    answer = ask("GET", path, headers={"if-none-match": etag} if etag else {}, max_bytes=MANIFEST_BYTES)
    if answer.status == 304 and etag:
        return None
    if answer.status != 200:
        raise answer.error()
    try:
        manifest = open_manifest(answer.body.decode("utf-8", "replace"), list(map(public_key, expected.manifest_keys)))
    except Refusal as error:
        raise ContactError("bad_manifest", f"{error}", "permanent") from error
    check_manifest(manifest, expected)
    return manifest, answer.headers.get("etag")


def check_manifest(manifest: Manifest, expected: Expected) -> None:
    """Raise ContactError unless a signed manifest is to be followed."""
    if (manifest.population, manifest.schema) != (expected.population, expected.schema):
        raise ContactError("bad_manifest", "The manifest is for rules of another population or model.", "permanent")
    if manifest.version < max(expected.least_version, 1):
        message = f"The manifest is of version {manifest.version}, but {expected.least_version} was seen before."
        raise ContactError("old_manifest", message)
    if manifest.expires < expected.now:
        raise ContactError("expired_manifest", "The manifest has expired; the rules in use are kept.")
    if not 0 < manifest.size <= expected.max_bytes:
        raise ContactError("bad_manifest", f"The manifest promises {manifest.size} bytes of rules.", "permanent")
    if agent_version(manifest.min_agent) > agent_version(expected.agent_version):
        message = f"The rules need fednl-runtime {manifest.min_agent}. Upgrade this device."
        raise ContactError("agent_too_old", message, "permanent")


def fetch_rules(ask: Ask, manifest: Manifest) -> bytes:
    """The file of the rules that a manifest promises. Raises ContactError."""
    path = f"/v1/populations/{manifest.population}/rules/{manifest.version}"
    answer = ask("GET", path, max_bytes=manifest.size)
    if answer.status != 200:
        raise answer.error()
    if len(answer.body) != manifest.size or hashlib.sha256(answer.body).hexdigest() != manifest.sha256:
        raise ContactError("bad_rules", "The rules are not those that the manifest promises.")
    return answer.body
