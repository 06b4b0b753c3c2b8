"""The bodies that requests about sessions may have."""

from __future__ import annotations

import math
import uuid
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fednl_runtime.errors import RequestError
from fednl_runtime.server_api.answering.turn_of import SESSION_ID

MAX_PAIRS = 16
"""Pairs of metadata, with names and values as long as OpenAI's may be."""
MAX_NAME = 64
MAX_VALUE = 512
NAME_RULE = "must be 1 to 128 letters, digits or _.:- and begin with a letter or digit."


class Body(BaseModel):
    """A body in which an unknown field is refused, not ignored."""

    model_config = ConfigDict(extra="forbid", strict=True)


class SettingsRequest(Body):
    """What can be set of a session; only fields that are given change anything."""

    frozen: bool = False
    sync: bool = True
    ttl_s: float | None = None
    metadata: dict[str, str] = Field(default_factory=dict)

    def changes(self) -> dict[str, Any]:
        """The settings that are given. Raises RequestError."""
        if self.ttl_s is not None and not (math.isfinite(self.ttl_s) and self.ttl_s > 0):
            raise RequestError("ttl_s must be a number of seconds above 0, or null to keep the session.", "ttl_s")
        lengths = [(len(name), len(value)) for name, value in self.metadata.items()]
        if len(lengths) > MAX_PAIRS or any(name > MAX_NAME or value > MAX_VALUE for name, value in lengths):
            raise RequestError(
                f"metadata holds at most {MAX_PAIRS} pairs, names of {MAX_NAME} and values of {MAX_VALUE} characters.",
                "metadata",
            )
        return {name: getattr(self, name) for name in ("frozen", "sync", "ttl_s", "metadata") if self._given(name)}

    def _given(self, name: str) -> bool:
        return name in self.model_fields_set


class CreateRequest(SettingsRequest):
    """A session to make, with a name of our choice if none is given."""

    id: str | None = None


class VersionRequest(Body):
    """A version by its number or by the name of its snapshot."""

    version: int | None = Field(default=None, ge=0)
    snapshot: str | None = None

    def version_or_name(self) -> int | str | None:
        """The version that is named, None if none is. Raises RequestError if two are."""
        if self.version is not None and self.snapshot is not None:
            raise RequestError("Give version or snapshot, not both.", "version")
        return self.snapshot if self.version is None else self.version


class ForkRequest(VersionRequest):
    """A session to make out of a version of another, by default its head."""

    id: str | None = None


class RollbackRequest(VersionRequest):
    """How far to go back: to a version, or by a number of turns, by default one."""

    turns: int | None = Field(default=None, ge=1)

    def turns_back(self) -> int:
        """The number of turns. Raises RequestError if a version is given as well."""
        if self.turns is not None and self.version_or_name() is not None:
            raise RequestError("Give turns, version or snapshot, one of them.", "turns")
        return 1 if self.turns is None else self.turns


class SnapshotRequest(Body):
    """A name for the head."""

    name: str

    def checked(self) -> str:
        """The name. Raises RequestError."""
        return checked_name(self.name, "name")


class TextRequest(Body):
    """Something to read: text or token ids."""

    text: str | None = None
    tokens: list[int] | None = None

    def content(self) -> str | tuple[int, ...]:
        """What is to be read. Raises RequestError unless it is one of the two, and not empty."""
        if (self.text is None) == (self.tokens is None):
            raise RequestError("Give text or tokens, one of them.", "text")
        content = tuple(self.tokens or ()) if self.text is None else self.text
        if not content:
            raise RequestError("There is nothing to read; give at least one character or token.", "text")
        return content


class IngestRequest(TextRequest):
    """Something to learn."""

    stream: bool = False
    session_version: int | None = None
    on_disconnect: Literal["rollback", "commit"] = "rollback"


class ScoreRequest(TextRequest):
    """Something to score, by memories that learn from it as they go and by ones that do not."""

    arms: list[Literal["learning", "frozen"]] = Field(default=["learning", "frozen"], min_length=1)


def new_name(given: str | None) -> str:
    """The name that a session is to get, a random one if none is given. Raises RequestError."""
    return f"sess_{uuid.uuid4().hex}" if given is None else checked_name(given, "id")


def checked_name(name: str, param: str) -> str:
    """A name that is well formed. Raises RequestError."""
    if not SESSION_ID.fullmatch(name):
        raise RequestError(f"{param} {NAME_RULE}", param)
    return name
