"""API keys: made once, stored as hashes, each with the scopes it is good for."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import os
import re
import secrets
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fednl_runtime.errors import FednlError
from fednl_runtime.server_api.entrance.scopes import SCOPES

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
DIGEST = re.compile(r"[0-9a-f]{64}")
DEFAULT_NAME = "default"
"""Name of the key that comes from the environment."""


class KeyFileError(FednlError):
    """A file of API keys that cannot be used."""


@dataclasses.dataclass(frozen=True)
class Caller:
    """Who sent a request: the name of its key, "" on a server without keys, and what that key is good for."""

    key_id: str
    scopes: frozenset[str]


ANYONE = Caller("", frozenset(SCOPES))
"""The caller of a server without keys."""


@dataclasses.dataclass(frozen=True)
class ApiKey:
    """A key as it is stored: its name, its scopes and the SHA-256 of its secret in hexadecimal digits."""

    name: str
    scopes: frozenset[str]
    sha256: str

    def line(self) -> str:
        """The line of a key file that holds this key."""
        scopes = ", ".join(f'"{scope}"' for scope in SCOPES if scope in self.scopes)
        return f'{self.name} = {{ scopes = [{scopes}], sha256 = "{self.sha256}" }}'


class KeyRing:
    """The keys that a server knows; without any, everybody may do everything."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    def caller(self, secret: bytes) -> Caller | None:
        """Whose `secret` it is, None if nobody's. Every key is compared, each in constant time."""
        if not self._keys:
            return ANYONE
        digest = digest_of(secret)
        found = [key for key in self._keys if hmac.compare_digest(key.sha256, digest)]
        return Caller(found[0].name, found[0].scopes) if found else None


def digest_of(secret: bytes) -> str:
    """SHA-256 of a key in hexadecimal digits.

    The keys we make hold 256 random bits, which no dictionary finds; that is why a slow hash is not needed.
    """
    return hashlib.sha256(secret).hexdigest()


def new_key(name: str, scopes: Iterable[str]) -> tuple[str, ApiKey]:
    """A fresh secret and the key to store. Raises KeyFileError for a name or scope that cannot be."""
    secret = f"fednl_{secrets.token_urlsafe(32)}"
    return secret, _checked(ApiKey(name, frozenset(scopes), digest_of(secret.encode())))


def key_ring(secret: str | None, file: Path | None) -> KeyRing:
    """The keys of a server: one from the environment, good for everything, and those of a file.

    Raises:
        KeyFileError: the file cannot be used.
    """
    keys = [] if file is None else load_keys(file)
    if secret is not None:
        if any(key.name == DEFAULT_NAME for key in keys):
            raise KeyFileError(f"{file}: {DEFAULT_NAME!r} is the key of the environment; choose another name.")
        keys.append(ApiKey(DEFAULT_NAME, frozenset(SCOPES), digest_of(os.fsencode(secret))))
    return KeyRing(keys)


def load_keys(file: Path) -> list[ApiKey]:
    """The keys of a file: TOML, one line a key, as `fednl-runtime keys new` prints it. Raises KeyFileError."""
    try:
        if file.stat().st_mode & 0o002:
            raise KeyFileError(f"{file} can be written by everybody; run: chmod go-w {file}")
        table = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise KeyFileError(f"{file} cannot be read as a file of keys: {error}") from error
    keys = [_parsed(file, name, value) for name, value in table.items()]
    if not keys:
        raise KeyFileError(f"{file} holds no key; make one with: fednl-runtime keys new --name NAME")
    return keys


def add_key(file: Path, key: ApiKey) -> None:
    """Add a key to a file, which is made if it is not there. Raises KeyFileError if its name is taken."""
    keys = load_keys(file) if file.exists() else []
    if key.name in (old.name for old in keys):
        raise KeyFileError(f"{file} has a key {key.name!r} already; choose another name, or take its line out.")
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as out:
        out.write(f"{key.line()}\n")


def _parsed(file: Path, name: str, value: Any) -> ApiKey:
    fields = value if isinstance(value, Mapping) else {}
    scopes, digest = fields.get("scopes"), fields.get("sha256")
    if set(fields) != {"scopes", "sha256"} or not isinstance(scopes, list) or not isinstance(digest, str):
        raise KeyFileError(f"{file}: {name} must have scopes and sha256, as `fednl-runtime keys new` prints them.")
    if not DIGEST.fullmatch(digest):
        raise KeyFileError(f"{file}: sha256 of {name} must be 64 digits of 0 to 9 and a to f.")
    return _checked(ApiKey(name, frozenset(map(str, scopes)), digest))


def _checked(key: ApiKey) -> ApiKey:
    if not NAME.fullmatch(key.name):
        raise KeyFileError(f"{key.name!r} is no name of a key; use up to 64 letters, digits, - and _.")
    if not key.scopes or not key.scopes <= set(SCOPES):
        raise KeyFileError(f"{key.name} must have one or more of the scopes {', '.join(SCOPES)}.")
    return key
