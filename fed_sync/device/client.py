"""A device's side of the protocol: signed requests to an endpoint that may hang, lie, flood or be gone."""

from __future__ import annotations

import asyncio
import dataclasses
import email.utils
import ipaddress
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fednl_runtime.errors import FednlError
from fednl_runtime.fed_sync.device.schedule import Trouble
from fednl_runtime.fed_sync.errors import SyncError
from fednl_runtime.fed_sync.signing import sign_request

JSON = "application/json"
JSON_BYTES = 1 << 18
"""Bytes of the largest answer that is not a file of rules."""
REQUEST_S = 60.0
"""Seconds that a request may take from its first packet to the last of its answer."""
TRANSIENT = {408, 425, 429}


class ContactError(FednlError):
    """A contact with the endpoint that failed; `code` is the endpoint's, or `network`, `timeout`, `bad_answer`."""

    def __init__(
        self, code: str, message: str, trouble: Trouble = "transient", retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.trouble, self.retry_after = code, trouble, retry_after


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer, read whole."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> dict[str, Any]:
        """The body as a JSON object. Raises ContactError."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError) as error:
            raise bad_answer("is no JSON") from error
        if not isinstance(found, dict):
            raise bad_answer("is no JSON object")
        return found

    @property
    def next_sync(self) -> tuple[float, float] | None:
        """The seconds between which to come again, if the endpoint said so."""
        parts = re.fullmatch(r"(\d{1,9}), ?(\d{1,9})", self.headers.get("next-sync", ""))
        return (float(parts[1]), float(parts[2])) if parts else None

    @property
    def date(self) -> float | None:
        """The endpoint's clock in seconds since 1970, if it told it."""
        try:
            return email.utils.parsedate_to_datetime(self.headers.get("date", "")).timestamp()
        except (ValueError, TypeError, OverflowError):
            return None

    @property
    def retry_after(self) -> float | None:
        """Seconds to wait, if the endpoint said so."""
        text = self.headers.get("retry-after", "")
        return float(text) if re.fullmatch(r"\d{1,9}", text) else None

    def error(self) -> ContactError:
        """What an answer that is no success means for the next try."""
        problem: dict[str, Any] = {}
        if self.status >= 400:
            try:
                problem = self.json()
            except ContactError:  # a proxy on the way has pages of its own
                problem = {}
        code = str(problem.get("code", f"http_{self.status}"))[:64]
        detail = str(problem.get("detail", f"The endpoint answered with status {self.status}."))[:400]
        return ContactError(code, detail, self._trouble(code), self.retry_after)

    def _trouble(self, code: str) -> Trouble:
        if self.status == 401:
            return "auth"
        later = self.status < 400 or self.status >= 500 or self.status in TRANSIENT or code == "paused"
        return "transient" if later else "permanent"


def bad_answer(why: str) -> ContactError:
    """The error of an answer that is none of the protocol's."""
    return ContactError("bad_answer", f"The endpoint's answer {why}. Is the address that of an aggregation endpoint?")


def checked_url(url: str) -> str:
    """The base address of an endpoint, without a slash at its end.

    Raises:
        SyncError: it is no http address, or an unencrypted one of another machine.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError as error:
        raise SyncError(f"{url} is no address ({error}). Give one such as https://example.org.") from error
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or parts.username:
        raise SyncError(f"{url} is no address of an endpoint. Give one such as https://example.org.")
    if parts.scheme == "http" and not _is_loopback(host):
        raise SyncError(f"{url} is not encrypted. Give an https address; http is for this machine alone.")
    return url.rstrip("/")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Endpoint:
    """An endpoint as one device sees it. A request ends in time and in bounded memory, whatever comes back."""

    def __init__(
        self, url: str, key: Ed25519PrivateKey, clock: Callable[[], float], request_s: float = REQUEST_S
    ) -> None:
        """Requests go to paths below `url`, signed by `key` at the time of `clock`."""
        self.url, self._key, self._clock, self._request_s = url, key, clock, request_s
        self._tls = httpx.create_ssl_context() if url.startswith("https:") else False  # loopback alone does without
        self.up = self.down = 0
        """Bytes sent and received, headers included as they are counted before compression."""

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        content_type: str = JSON,
        headers: Mapping[str, str] | None = None,
        max_bytes: int = JSON_BYTES,
    ) -> Answer:
        """The answer to a signed request, of whatever status.

        Raises:
            ContactError: none came, or one that is too large, too slow or no HTTP.
        """
        about = {} if body is None else {"content-type": content_type}
        request = httpx.Request(
            method,
            self.url + path,
            content=body,
            headers={"accept-encoding": "identity", "user-agent": "fednl-runtime", **about, **(headers or {})},
        )
        sign_request(request, self._key, body, self._clock())
        try:
            return asyncio.run(self._send(request, len(body or b""), max_bytes))
        except TimeoutError as error:
            raise ContactError("timeout", f"The endpoint did not answer within {self._request_s:g} s.") from error
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, OSError, ValueError) as error:
            raise ContactError(
                "network", f"The endpoint cannot be reached ({str(error) or type(error).__name__})."
            ) from error

    async def _send(self, request: httpx.Request, length: int, max_bytes: int) -> Answer:
        """Send and read; the clock runs over all of it, so that a byte now and then does not keep it going."""
        self.up += length + _size(request.headers)
        client = httpx.AsyncClient(verify=self._tls, timeout=self._request_s)
        async with asyncio.timeout(self._request_s), client:
            response = await client.send(request, stream=True)
            try:
                self.down += _size(response.headers)
                return Answer(response.status_code, dict(response.headers), await self._read(response, max_bytes))
            finally:
                await response.aclose()

    async def _read(self, response: httpx.Response, max_bytes: int) -> bytes:
        if response.headers.get("content-encoding", "identity") != "identity":
            raise bad_answer("is compressed, which was not asked for")
        parts, total = list[bytes](), 0
        async for part in response.aiter_raw():
            self.down += len(part)
            total += len(part)
            if total > max_bytes:
                raise bad_answer(f"is larger than {max_bytes} bytes")
            parts.append(part)
        return b"".join(parts)


def _size(headers: httpx.Headers) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers.raw)


def number(fields: Mapping[str, Any], name: str, least: float = 0, most: float = math.inf) -> float:
    """A number out of an answer. Raises ContactError if it is none, or out of range."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise bad_answer(f"has {name} {str(value)[:40]!r}")
    return value
