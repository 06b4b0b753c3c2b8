"""From a request to the turn it asks for: whose session, which version, and whether it was sent before."""

from __future__ import annotations

import hashlib
import json
import re
from typing import TYPE_CHECKING

from fastapi import Request

from fednl_runtime.errors import RequestError
from fednl_runtime.history import Mode
from fednl_runtime.sampling import SamplingParams
from fednl_runtime.server_api.schemas.completions import Learn, TurnFields
from fednl_runtime.server_api.served import owner_of
from fednl_runtime.turn import Retry, TurnRequest

if TYPE_CHECKING:
    from pydantic import BaseModel

SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")
SESSION_HEADER = "x-session-id"
SESSION_HEADERS = (SESSION_HEADER, "x-session-affinity", "x-conversation-id", "x-openwebui-chat-id")
"""For clients without extra fields; the last three are what clients send already."""
RETRY_KEY_HEADER = "idempotency-key"
RETRY_COUNT_HEADER = "x-stainless-retry-count"
"""In which OpenAI's clients say how often they have sent a request before."""
MAX_RETRY_KEY = 255


def turn_of(body: TurnFields, request: Request, params: SamplingParams, learn: Learn, mode: Mode) -> TurnRequest:
    """The turn that a request asks for, without its prompt; `learn` and `mode` hold if it does not say.

    Raises:
        RequestError: a session or a key that is not well formed, two different sessions, or the version of none.
    """
    session_id = session_of(body, request)
    if body.session_version is not None and session_id is None:
        raise RequestError("session_version needs a session; name it by session_id.", "session_version")
    return TurnRequest(
        prompt=(),
        params=params,
        session_id=session_id,
        learn=learn if body.learn is None else body.learn,
        owner=owner_of(request),
        mode=body.session_mode or mode,
        expect_version=body.session_version,
        retry=retry_of(body, request),
        request_id=request.state.request_id,
    )


def session_of(body: TurnFields, request: Request) -> str | None:
    """The session that a request names, in its body or in a header; None if it names none.

    Raises:
        RequestError: the name is not well formed, or two places name different sessions.
    """
    named = {header: value for header in SESSION_HEADERS if (value := request.headers.get(header))}
    if body.session_id is not None:
        named["session_id"] = body.session_id
    if len(set(named.values())) > 1:
        raise RequestError(f"{' and '.join(named)} name different sessions; send one of them.", "session_id")
    session_id = next(iter(named.values()), None)
    if session_id is not None and not SESSION_ID.fullmatch(session_id):
        raise RequestError(
            "session_id must be 1 to 128 letters, digits or _.:- and begin with a letter or digit.", "session_id"
        )
    return session_id


def retry_of(body: BaseModel, request: Request) -> Retry:
    """What tells a request from one that was answered before. Raises RequestError for a key that is none."""
    key = request.headers.get(RETRY_KEY_HEADER)
    if key is not None and not (key.isascii() and key.isprintable() and 1 <= len(key) <= MAX_RETRY_KEY):
        raise RequestError(
            f"Idempotency-Key must be 1 to {MAX_RETRY_KEY} printable ASCII characters.", RETRY_KEY_HEADER
        )
    count = request.headers.get(RETRY_COUNT_HEADER, "0")
    said = json.dumps([request.url.path, body.model_dump()], sort_keys=True)
    return Retry(hashlib.sha256(said.encode()).hexdigest(), key, count.isdecimal() and int(count[:4]) > 0)
