"""The endpoint as a letter from it knows it: what it answers already, and one upload that goes back with the reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fednl_runtime.fed_sync.device.client import JSON, JSON_BYTES, Answer, ContactError, Endpoint, bad_answer
from fednl_runtime.fed_sync.device.folder import Device, Invitation
from fednl_runtime.fed_sync.device.local_training import LocalModel, Train
from fednl_runtime.fed_sync.device.participant import Participant, SyncSettings
from fednl_runtime.fed_sync.flower.letters import ADDRESS, HEADERS, Answered, Posted
from fednl_runtime.fed_sync.signing import sign_request
from fednl_runtime.state import Tensors

POSTED, UNANSWERED = "posted", "unanswered"
"""Codes of requests that the letter does not answer: the upload that goes with the reply, and all others."""


class Mailbox(Endpoint):
    """Answers out of a letter; no request leaves the device."""

    def __init__(self, answers: Mapping[str, Answered], key: Ed25519PrivateKey, clock: Callable[[], float]) -> None:
        """Answers by method and path; uploads are signed by `key` at the time of `clock`."""
        super().__init__(ADDRESS, key, clock)
        self._answers = answers
        self._sender = key, clock
        self.posted: Posted | None = None
        """The upload that is to go with the reply."""

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        content_type: str = JSON,
        headers: Mapping[str, str] | None = None,
        max_bytes: int = JSON_BYTES,
    ) -> Answer:
        """The answer that the letter holds. Raises ContactError: `posted`, `unanswered`, or `bad_answer`."""
        known = self._answers.get(f"{method} {path}")
        if known is not None:
            self.down += len(known.body)
            if len(known.body) > max_bytes:
                raise bad_answer(f"is larger than {max_bytes} bytes")
            return Answer(known.status, {}, known.body)
        if method != "PUT" or body is None:
            raise ContactError(UNANSWERED, f"The letter does not answer {method} {path}; a later one may.")
        self._post(path, body, content_type)
        raise ContactError(POSTED, "The update goes with the reply; the next letter says what became of it.")

    def _post(self, path: str, body: bytes, content_type: str) -> None:
        key, clock = self._sender
        request = httpx.Request("PUT", ADDRESS + path, content=body, headers={"content-type": content_type})
        sign_request(request, key, body, clock())
        self.posted = Posted(path.rpartition("/")[2], {name: request.headers[name] for name in HEADERS}, body)
        self.up += len(body)


class Correspondent(Participant):
    """A device that takes part by letters; it was enrolled before."""

    def __init__(
        self,
        device: Device,
        population: str,
        model: LocalModel,
        mailbox: Mailbox,
        clock: Callable[[], float],
        settings: SyncSettings | None = None,
        train: Train | None = None,
    ) -> None:
        """As `Participant`; new rules are for the next server that starts on this device. Raises SyncError."""
        super().__init__(device, Invitation(ADDRESS, population), model, _later, clock, settings, train)
        self._endpoint = mailbox


def _later(rules: Tensors) -> None:
    """Nothing here runs with the rules."""


def exchange(part: Correspondent, mailbox: Mailbox) -> tuple[Posted | None, int]:
    """Make the contact; the upload that goes with the reply, None if none waits, and the version in use then.

    Raises:
        FednlError: as `Participant.contact` does; that a letter answers no more is the end of every contact.
    """
    try:
        part.contact(lambda: False)
    except ContactError as error:
        if error.code not in (POSTED, UNANSWERED):
            raise
    return mailbox.posted, part.version
