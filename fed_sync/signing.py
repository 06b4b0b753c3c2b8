"""Who sent a request: Ed25519 keys, and HTTP message signatures (RFC 9421) over method, address and body."""

from __future__ import annotations

import base64
import binascii
import datetime
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from http_message_signatures import (
    HTTPMessageSignaturesException,
    HTTPMessageSigner,
    HTTPMessageVerifier,
    HTTPSignatureKeyResolver,
    algorithms,
)

from fednl_runtime.errors import FednlError
from fednl_runtime.fed_sync.errors import Refusal, SigningKeyError

TAG = "fednl"
"""The tag of our signatures: one made for another application is none of ours."""
ADDRESS = ("@method", "@authority", "@path", "@query")
CONTENT = ("content-digest", "content-type")
"""What a signature covers: always the address; of a request with a body also these two headers."""
MAX_SKEW_S = 300
"""Seconds that the clocks of device and server may differ."""

Lookup = Callable[[str], Ed25519PublicKey | None]


class Message(Protocol):
    """A request as httpx and starlette have it."""

    @property
    def method(self) -> str:
        """The method in upper case."""
        ...

    @property
    def url(self) -> Any:
        """The absolute address."""
        ...

    @property
    def headers(self) -> Any:
        """A mapping of header names to values."""
        ...


def public_text(key: Ed25519PublicKey) -> str:
    """A public key as base64 of its 32 bytes."""
    return base64.b64encode(key.public_bytes_raw()).decode()


def public_key(text: str) -> Ed25519PublicKey:
    """The key that `public_text` wrote. Raises Refusal `bad_key`."""
    try:
        return Ed25519PublicKey.from_public_bytes(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError) as error:
        raise Refusal("bad_key", "A public key is the base64 of 32 bytes for Ed25519. Send it so.") from error


def key_id(key: Ed25519PublicKey) -> str:
    """The name of a key: the first 32 hex digits of its SHA-256."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:32]


def key_file(path: Path) -> Ed25519PrivateKey:
    """The private key in a file, which is made, for its owner's eyes only, if it is missing.

    Raises:
        SigningKeyError: the file is no Ed25519 key, or others may read it.
    """
    if not path.exists():
        _write_key(path, Ed25519PrivateKey.generate())
    if path.stat().st_mode & 0o077:
        raise SigningKeyError(f"{path} can be read by others. Run chmod 600 on it, or make a new key.")
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise SigningKeyError(f"{path} is no private key without password. Restore it from a copy.") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise SigningKeyError(f"{path} is no Ed25519 key. Make one by naming a file that does not exist.")
    return key


def _write_key(path: Path, key: Ed25519PrivateKey) -> None:
    """Write a key so that the file is whole or missing, whatever happens meanwhile."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)


class _Keys(HTTPSignatureKeyResolver):
    def __init__(self, lookup: Lookup, private: Ed25519PrivateKey | None = None) -> None:
        self._lookup, self._private = lookup, private

    def resolve_public_key(self, key_id: str) -> Ed25519PublicKey | None:
        """The key of that name, None if it is unknown."""
        return self._lookup(key_id)

    def resolve_private_key(self, key_id: str) -> Any:
        """Our own key."""
        return self._private


class _Verifier(HTTPMessageVerifier):
    """The library's verifier without its clock: times are checked once the signature is known to be right."""

    def validate_created_and_expires(self, sig_input: Any, max_age: Any = None) -> None:
        """Times are checked by `verify_request`."""


def sign_request(message: Message, key: Ed25519PrivateKey, body: bytes | None, now: float) -> None:
    """Add Content-Digest, Signature-Input and Signature to a request, at `now` seconds since 1970.

    A request with a body (empty ones too) must have its Content-Type already; `body` is None for one without.
    """
    signer = HTTPMessageSigner(signature_algorithm=algorithms.ED25519, key_resolver=_Keys(lambda _: None, key))
    signer.sign(
        message,
        key_id=key_id(key.public_key()),
        created=datetime.datetime.fromtimestamp(int(now), datetime.UTC),
        label=TAG,
        tag=TAG,
        covered_component_ids=ADDRESS if body is None else (*ADDRESS, *CONTENT),
        body=body,
    )


def verify_request(message: Message, lookup: Lookup, has_body: bool, now: float) -> str:
    """The id of the key that signed a request; that the body fits its digest is another check.

    Replays need no memory of nonces: every request of the protocol may be repeated without effect.

    Raises:
        Refusal: `bad_signature` if it is missing, of an unknown key or of another request; `clock_skew` if it is
            right but made more than five minutes away from `now`.
    """
    verifier = _Verifier(signature_algorithm=algorithms.ED25519, key_resolver=_Keys(lookup))
    try:
        (result,) = verifier.verify(
            message, max_age=None, expect_tag=TAG, require_components=(*ADDRESS, *CONTENT * has_body)
        )
    except (HTTPMessageSignaturesException, ValueError) as error:
        if isinstance(error.__cause__, FednlError):  # the key could not be looked up, which is not the sender's fault
            raise error.__cause__ from None
        raise Refusal("bad_signature", f"The request is not signed by a known device ({error}).") from error
    created, expires = result.parameters.get("created"), result.parameters.get("expires", now)
    if not isinstance(created, int) or abs(created - now) > MAX_SKEW_S or int(expires) < now - MAX_SKEW_S:
        raise Refusal("clock_skew", "The signature's time is not the server's. Set the clock by the Date header.")
    return str(result.parameters["keyid"])


def sign_text(text: str, key: Ed25519PrivateKey) -> str:
    """A base64 signature of a text."""
    return base64.b64encode(key.sign(text.encode())).decode()


def verify_text(text: str, signature: str, key: Ed25519PublicKey) -> None:
    """Raise Refusal `bad_signature` unless `sign_text` with this key gave the signature."""
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(base64.b64decode(signature, validate=True), text.encode())
    except (binascii.Error, ValueError, InvalidSignature) as error:
        raise Refusal("bad_signature", "The proof is not a signature by the new key. Sign the stated text.") from error
