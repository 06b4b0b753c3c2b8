"""Reading requests: bodies up to a limit, JSON of known fields, and answers that a client may hold already."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from fednl_runtime.fed_sync.errors import Refusal
from fednl_runtime.fed_sync.validate import check_size


@dataclasses.dataclass(frozen=True)
class Addressed:
    """A request under the address that its sender knows."""

    method: str
    url: str
    headers: Headers


async def body_of(request: Request, limit: int) -> bytes:
    """The body of a request; reading stops at the limit. Raises Refusal `too_large`."""
    length = request.headers.get("content-length", "0")
    check_size(int(length) if length.isdecimal() else 0, limit)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        check_size(size, limit)
        parts.append(part)
    return b"".join(parts)


def fields_of(request: Request, body: bytes, **kinds: type) -> dict[str, Any]:
    """The fields of a JSON object, exactly these, in this order.

    Raises:
        Refusal: `unsupported_media_type` or `malformed`.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refusal("unsupported_media_type", "Send the body as Content-Type: application/json.")
    try:
        fields: Mapping[str, Any] = json.loads(body)
        if set(fields) == set(kinds) and all(type(fields[name]) is kind for name, kind in kinds.items()):
            return {name: fields[name] for name in kinds}
    except (ValueError, TypeError, RecursionError):
        pass
    wanted = ", ".join(f"{name} ({kind.__name__})" for name, kind in kinds.items())
    raise Refusal("malformed", f"The body is not a JSON object of exactly {wanted}.")


def cached(request: Request, data: bytes, sha256: str, media_type: str, cache_control: str) -> Response:
    """Bytes with their digest as ETag; 304 without them for a client that has them."""
    tags = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    digest = base64.b64encode(bytes.fromhex(sha256)).decode()
    headers = {"etag": f'"{sha256}"', "cache-control": cache_control, "repr-digest": f"sha-256=:{digest}:"}
    if f'"{sha256}"' in tags:
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type=media_type)
