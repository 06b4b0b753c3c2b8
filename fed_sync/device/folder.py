"""A device's own folder for the federation: its key, where it is enrolled, what it remembers."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fednl_runtime.fed_sync.device import notes, outbox
from fednl_runtime.fed_sync.device.client import Answer, bad_answer, checked_url
from fednl_runtime.fed_sync.device.database import Database, storing
from fednl_runtime.fed_sync.device.files import replace_file
from fednl_runtime.fed_sync.device.notes import Notes
from fednl_runtime.fed_sync.device.outbox import Outbox
from fednl_runtime.fed_sync.device.recent import RecentText
from fednl_runtime.fed_sync.errors import Refusal, SyncError
from fednl_runtime.fed_sync.signing import key_file, public_key, public_text
from fednl_runtime.files import make_private
from fednl_runtime.session import SessionKey


@dataclasses.dataclass(frozen=True)
class Enrolment:
    """Where a device takes part, and the keys that its rules must be signed by, as `public_text` writes them."""

    population: str
    device_id: str
    manifest_keys: tuple[str, ...]


class Device:
    """The folder, opened; `close` it. It also is the journal of the session store: text to keep, sessions to forget."""

    def __init__(self, folder: Path, end_of_text: int, max_recent_bytes: int = 1 << 20) -> None:
        """Open or make the folder. Raises StoreError, SigningKeyError."""
        with storing(folder):
            make_private(folder)
        self.folder = folder
        with contextlib.ExitStack() as opened:
            self.recent = RecentText(folder / "recent.db", end_of_text, max_recent_bytes)
            opened.callback(self.recent.close)
            self._db = Database(folder / "sync.db", outbox.SCHEMA + notes.SCHEMA)
            opened.callback(self._db.close)
            self.outbox, self.notes = Outbox(self._db), Notes(self._db)
            self.key: Ed25519PrivateKey = key_file(folder / "device.key")
            opened.pop_all()

    def record(self, key: SessionKey, tokens: tuple[int, ...]) -> None:
        """Keep the text of a committed turn for training; a turn never fails because of it."""
        self.recent.record(key, tokens)

    def forget(self, key: SessionKey) -> None:
        """Delete a session's text, and the updates it taught that have not been counted. Raises StoreError."""
        self.recent.forget(key)
        self.outbox.forget(self.recent.tag(key))

    def enrolment(self) -> Enrolment | None:
        """Where the device is enrolled, None if it is not. Raises SyncError if the file is damaged."""
        path = self.folder / "enrolment.json"
        if not path.exists():
            return None
        try:
            fields = json.loads(path.read_text())
            found = Enrolment(**{**fields, "manifest_keys": tuple(fields["manifest_keys"])})
            list(map(public_key, found.manifest_keys))
        except (OSError, ValueError, TypeError, KeyError, Refusal) as error:
            raise SyncError(f"{path} is damaged ({error}). Remove it and enrol again with a new token.") from error
        return found

    def close(self) -> None:
        """Close all files."""
        self.recent.close()
        self._db.close()

    @contextlib.contextmanager
    def only_agent(self) -> Iterator[None]:
        """Be the only agent of this folder for as long as the block runs. Raises SyncError."""
        lock = os.open(self.folder / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        with contextlib.ExitStack() as held:
            held.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SyncError(f"Another process syncs {self.folder} already. Stop it first.") from None
            yield


@dataclasses.dataclass(frozen=True)
class Invitation:
    """Where a device is to take part: as it is enrolled, or with a one-time token.

    Rules must be signed by `manifest_key`; without one, by the key that the endpoint told at enrolment.
    """

    url: str
    population: str
    token: str | None = None
    manifest_key: str | None = None

    def check(self, device: Device) -> None:
        """Raise SyncError if the device can never follow the invitation."""
        checked_url(self.url)
        if self.manifest_key is not None:
            try:
                public_key(self.manifest_key)
            except Refusal as error:
                raise SyncError(f"The manifest key cannot be read. {error}") from error
        enrolment = device.enrolment()
        if enrolment is None and self.token is None:
            raise SyncError("This device is not enrolled. Ask the operator for a token and run `sync enrol`.")
        if enrolment is not None and enrolment.population != self.population:
            raise SyncError(
                f"This device is enrolled for {enrolment.population!r}, not {self.population!r}. "
                f"Name that, or remove {device.folder} and enrol again."
            )


def joined(device: Device, invitation: Invitation, ask: Callable[..., Answer]) -> Enrolment:
    """The enrolment of a device, which is made now if there is none: once more with the same key is no harm.

    Raises:
        ContactError: the endpoint refused the token, or answered something else.
    """
    if (known := device.enrolment()) is not None:
        given = invitation.manifest_key
        return known if given is None else dataclasses.replace(known, manifest_keys=(given,))
    about = {"token": invitation.token, "public_key": public_text(device.key.public_key())}
    answer = ask("POST", "/v1/devices", json.dumps(about).encode())
    if answer.status not in (200, 201):
        raise answer.error()
    fields = answer.json()
    if fields.get("population") != invitation.population:
        raise bad_answer(f"enrols for population {str(fields.get('population'))[:64]!r}")
    pinned = invitation.manifest_key or str(fields.get("manifest_key"))
    try:
        public_key(pinned)
    except Refusal as error:
        raise bad_answer("names no manifest key") from error
    found = Enrolment(invitation.population, str(fields.get("device_id"))[:64], (pinned,))
    replace_file(device.folder / "enrolment.json", json.dumps(dataclasses.asdict(found), indent=1).encode())
    return found
