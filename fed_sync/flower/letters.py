"""What Flower carries: to a device the answers to what it may ask, from a device one signed upload."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from flwr.app import ConfigRecord, Message, RecordDict

from fednl_runtime.fed_sync.errors import Refusal, SyncError

ADDRESS = "https://flower.invalid"
"""The address that devices sign: none that a request could be sent to."""
RECORD = "fednl"
HEADERS = ("content-type", "content-digest", "signature-input", "signature")
"""The headers of an upload that travel: its type, and what the signature needs."""


@dataclasses.dataclass(frozen=True)
class Answered:
    """The endpoint's answer to a request."""

    status: int
    body: bytes


@dataclasses.dataclass(frozen=True)
class Posted:
    """An upload as HTTP has it: the id of the update, headers and body."""

    update_id: str
    headers: Mapping[str, str]
    body: bytes


def upload_path(population: str, update_id: str) -> str:
    """Where an update is put."""
    return f"/v1/populations/{population}/updates/{update_id}"


def letter(answers: Mapping[str, Answered]) -> RecordDict:
    """A letter to a device, with answers by method and path."""
    answered = answers.values()
    record = ConfigRecord(
        {
            "asked": list(answers),
            "status": [answer.status for answer in answered],
            "body": [answer.body for answer in answered],
        }
    )
    return RecordDict({RECORD: record})


def answers_in(message: Message) -> dict[str, Answered]:
    """The answers in a letter. Raises SyncError if it is none of ours."""
    record = message.content.get(RECORD)
    columns = [record.get(name) for name in ("asked", "status", "body")] if isinstance(record, ConfigRecord) else []
    if len(columns) != 3 or not all(isinstance(column, list) for column in columns):
        raise SyncError(f"The letter has no config record {RECORD!r} of answers. Run our ServerApp.")
    return {str(asked): Answered(int(status), bytes(body)) for asked, status, body in zip(*columns, strict=True)}


def reply(posted: Posted | None, version: int) -> RecordDict:
    """A device's reply: its next upload, if one waits, and the version of the rules it uses."""
    record = ConfigRecord({"version": version})
    if posted is not None:
        record["update_id"], record["body"] = posted.update_id, posted.body
        for name in HEADERS:
            record[name] = posted.headers[name]
    return RecordDict({RECORD: record})


def posted_in(message: Message) -> Posted | None:
    """The upload in a reply, None if none waits there. Raises Refusal `malformed`."""
    record = _record_of(message)
    if "update_id" not in record:
        return None
    texts = {name: record.get(name) for name in ("update_id", *HEADERS)}
    body = record.get("body")
    if not isinstance(body, bytes) or not all(isinstance(text, str) for text in texts.values()):
        raise Refusal("malformed", f"An upload by Flower has a body and the texts {', '.join(texts)}. Send them.")
    return Posted(str(texts["update_id"]), {name: str(texts[name]) for name in HEADERS}, body)


def version_in(message: Message) -> int | None:
    """The version of the rules that a device uses, None if the reply does not say."""
    try:
        version = _record_of(message).get("version")
    except Refusal:
        return None
    return version if type(version) is int else None


def _record_of(message: Message) -> ConfigRecord:
    record = message.content.get(RECORD)
    if not isinstance(record, ConfigRecord):
        raise Refusal("malformed", f"The reply has no config record {RECORD!r}. Run our ClientApp.")
    return record
