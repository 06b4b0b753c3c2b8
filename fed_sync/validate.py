"""What is checked of an upload before it counts, in this order: size, type, digest, body, count, base, norm."""

from __future__ import annotations

import dataclasses
import re
import uuid
from collections.abc import Mapping

from http_message_signatures import ContentDigest, HTTPMessageSignaturesException

from fednl_runtime.fed_sync.aggregate import norm
from fednl_runtime.fed_sync.errors import Refusal
from fednl_runtime.fed_sync.update import MEDIA_TYPE, ClientUpdate, Schema, decode

HEADER_BYTES = 1 << 16
"""What names, shapes and metadata of an update may take."""

ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
"""A UUIDv7 in its one spelling."""
ID_WINDOW_S = 60 * 86_400
"""Seconds for which an update's id is remembered; older ones are refused, so that none can come back."""
ID_SKEW_S = 86_400
"""Seconds that an update's id may lie in the future."""


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What an update may be."""

    schema: Schema
    max_tokens: int
    max_norm: float
    """Largest norm of a difference; what is longer was not clipped on the device and is no honest update."""

    @property
    def max_bytes(self) -> int:
        """Bytes of the largest upload."""
        return 4 * self.schema.size + HEADER_BYTES


def check_size(length: int, limit: int) -> None:
    """Raise Refusal `too_large` if a body of `length` bytes is above the limit."""
    if length > limit:
        raise Refusal("too_large", f"The body is larger than {limit} bytes. Send fewer numbers or a smaller encoding.")


def check_type(content_type: str) -> None:
    """Raise Refusal `unsupported_media_type` unless the body is said to be an update of version 1."""
    kind, _, parameters = (part.strip().lower() for part in content_type.partition(";"))
    if kind != MEDIA_TYPE or parameters not in ("", "v=1"):
        raise Refusal("unsupported_media_type", f"Send an update as Content-Type: {MEDIA_TYPE}; v=1.")


def check_digest(header: str, body: bytes) -> None:
    """Raise Refusal `digest_mismatch` unless the Content-Digest header (RFC 9530) is the body's."""
    try:
        ContentDigest.verify(header, body)
    except HTTPMessageSignaturesException as error:
        raise Refusal(
            "digest_mismatch", "The body is not the one of the Content-Digest header. Send it again."
        ) from error


def check_id(update_id: str, now: float) -> str:
    """The id of an update in its one spelling.

    Raises:
        Refusal: `bad_update_id` if it is no UUIDv7 or from the future, `update_id_expired` if it is too old.
    """
    if not ID.fullmatch(update_id):
        raise Refusal("bad_update_id", "The id of an update is a UUIDv7 in lower case. Make one with the update.")
    made = (uuid.UUID(update_id).int >> 80) / 1000
    if made > now + ID_SKEW_S:
        raise Refusal("bad_update_id", "The update's id is from the future. Set the clock and make a new id.")
    if made < now - ID_WINDOW_S:
        raise Refusal("update_id_expired", "The update's id is too old and was never counted. Make a new update.")
    return update_id


def check_update(body: bytes, bounds: Bounds, bases: Mapping[int, int], current: int) -> tuple[ClientUpdate, int]:
    """The update in a body and its staleness; `bases` holds the versions an update may start from, with theirs.

    Raises:
        Refusal: as `decode` does, then `bad_count`, `unknown_base`, `stale_base` or `norm_absurd`, in this order.
    """
    update = decode(body, bounds.schema)
    if not 1 <= update.num_tokens <= bounds.max_tokens:
        raise Refusal("bad_count", f"num_tokens is {update.num_tokens}; it must be 1 to {bounds.max_tokens}.")
    if update.base_version not in bases:
        raise wrong_base(update.base_version, current)
    if (length := norm(bounds.schema.vector(update.delta))) > bounds.max_norm:
        raise Refusal("norm_absurd", f"The norm is {length:.4g}, above {bounds.max_norm:.4g}. Clip before you send.")
    return update, bases[update.base_version]


def wrong_base(base: int, current: int) -> Refusal:
    """The refusal of an update from a version that is none or too old; it names the one to fetch."""
    if base > current:
        return Refusal("unknown_base", f"Version {base} does not exist. Fetch version {current}.", current)
    return Refusal("stale_base", f"Version {base} is too old. Fetch version {current} and train again.", current)
