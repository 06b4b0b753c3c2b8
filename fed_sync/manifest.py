"""What the server says of a version of the rules, signed as a DSSE envelope."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import Error as LibraryError
from securesystemslib.signer import CryptoSigner, SSlibKey  # type: ignore[attr-defined]

from fednl_runtime.fed_sync.errors import Refusal
from fednl_runtime.fed_sync.signing import key_id

PAYLOAD_TYPE = "application/vnd.fednl.manifest+json"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """One published version; times are whole seconds since 1970."""

    population: str
    version: int
    prev_version: int
    """The version it was made from; 0 for the first."""
    schema: str
    sha256: str
    """Of the file of the rules, in hex."""
    size: int
    """Of that file, in bytes."""
    created: int
    expires: int
    min_agent: str
    """The oldest agent that may use the rules."""
    members: int
    """Updates that were aggregated."""
    rule: str
    epsilon: float | None = None
    """Privacy spent so far; None without central privacy."""
    rollback_of: int | None = None
    """The version that this one takes back."""


TYPES: dict[str, Any] = {
    **dict.fromkeys(("population", "schema", "sha256", "min_agent", "rule"), str),
    **dict.fromkeys(("version", "prev_version", "size", "created", "expires", "members"), int),
    "epsilon": (float, int, type(None)),
    "rollback_of": (int, type(None)),
}


def sign_manifest(manifest: Manifest, key: Ed25519PrivateKey) -> str:
    """The envelope as JSON."""
    envelope = Envelope(json.dumps(dataclasses.asdict(manifest), sort_keys=True).encode(), PAYLOAD_TYPE, {})
    envelope.sign(CryptoSigner(key, _library_key(key.public_key())))
    return json.dumps(envelope.to_dict(), sort_keys=True)


def open_manifest(text: str, keys: Sequence[Ed25519PublicKey]) -> Manifest:
    """The manifest in an envelope that one of the pinned keys signed.

    That its version grows, that it has not expired and that the rules have its digest is for the caller to check.

    Raises:
        Refusal: `bad_manifest`.
    """
    try:
        envelope = Envelope.from_dict(json.loads(text))
        envelope.verify([_library_key(key) for key in keys], 1)
        fields = json.loads(envelope.payload)
        if envelope.payload_type != PAYLOAD_TYPE or set(fields) != set(TYPES):
            raise ValueError("it is no manifest of this protocol")
        if wrong := [name for name, kind in TYPES.items() if not isinstance(fields[name], kind)]:
            raise ValueError(f"{wrong[0]} has another type")
        return Manifest(**fields)
    except (LibraryError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refusal("bad_manifest", f"The manifest is not signed by a pinned key, or damaged ({error}).") from error


def _library_key(key: Ed25519PublicKey) -> SSlibKey:
    return SSlibKey.from_crypto(key, key_id(key))
