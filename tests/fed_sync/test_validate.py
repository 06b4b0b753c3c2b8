"""Each check has its code, the first that fails decides, and an honest update passes all."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from updates import GOOD, SCHEMA, body_of, changed, update_of

from fednl_runtime.fed_sync import validate
from fednl_runtime.fed_sync.errors import Refusal
from fednl_runtime.fed_sync.update import MEDIA_TYPE, new_update_id
from fednl_runtime.fed_sync.validate import Bounds, check_digest, check_id, check_size, check_type, check_update

BOUNDS = Bounds(SCHEMA, max_tokens=1000, max_norm=10.0)
BASES = {3: 1, 4: 0}
NOW = 1.8e9


def code_of(check: Callable[..., Any], *arguments: Any) -> str | None:
    try:
        check(*arguments)
    except Refusal as refusal:
        return refusal.code
    return None


def checked(body: bytes) -> str | None:
    return code_of(check_update, body, BOUNDS, BASES, 4)


@pytest.mark.parametrize(("base", "staleness"), [(4, 0), (3, 1)])
def test_an_honest_update_passes_with_its_staleness(base, staleness):
    assert check_update(body_of(update_of(base_version=base)), BOUNDS, BASES, 4)[1] == staleness


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        ({"num_tokens": 0}, "bad_count"),
        ({"num_tokens": 1001}, "bad_count"),
        ({"num_tokens": 10**12}, "bad_count"),
        ({"base_version": 5}, "unknown_base"),
        ({"base_version": 2}, "stale_base"),
        ({"size": 10.0}, "norm_absurd"),
    ],
)
def test_an_update_that_cannot_count_gets_its_code(facts, code):
    assert checked(body_of(update_of(**{"base_version": 4, **facts}))) == code


def test_the_first_check_that_fails_decides():
    nan = {"rule.0.b_eta": np.full(7, np.nan, np.float32)}
    facts: dict[str, str] = {"schema": "0" * 64, "num_tokens": "0", "base_version": "9"}
    order = [checked(b"" if not facts else changed(nan, without="rule.top.p", **facts))]
    order.append(checked(changed(nan, without="rule.top.p", num_tokens="0", base_version="9")))
    order.append(checked(changed(nan, num_tokens="0", base_version="9")))
    order.append(checked(changed({"rule.0.b_eta": np.full(7, 1e9, np.float32)}, num_tokens="0", base_version="9")))
    order.append(checked(changed({"rule.0.b_eta": np.full(7, 1e9, np.float32)}, base_version="9")))
    order.append(checked(changed({"rule.0.b_eta": np.full(7, 1e9, np.float32)}, base_version="4")))
    assert order == ["wrong_schema", "wrong_names", "not_finite", "bad_count", "unknown_base", "norm_absurd"]


def test_the_largest_honest_upload_fits_and_a_byte_more_than_the_limit_does_not():
    assert code_of(check_size, len(GOOD), BOUNDS.max_bytes) is None
    assert code_of(check_size, BOUNDS.max_bytes, BOUNDS.max_bytes) is None
    assert code_of(check_size, BOUNDS.max_bytes + 1, BOUNDS.max_bytes) == "too_large"


@pytest.mark.parametrize("kind", [MEDIA_TYPE, MEDIA_TYPE + ";v=1", MEDIA_TYPE.upper() + " ; v=1"])
def test_the_media_type_is_known_in_any_spelling(kind):
    assert code_of(check_type, kind) is None


@pytest.mark.parametrize("kind", ["", "application/json", "application/x-pickle", MEDIA_TYPE + "; v=2"])
def test_another_media_type_is_refused(kind):
    assert code_of(check_type, kind) == "unsupported_media_type"


DIGEST = base64.b64encode(hashlib.sha256(GOOD).digest()).decode()
LONG = base64.b64encode(hashlib.sha512(GOOD).digest()).decode()


@pytest.mark.parametrize("header", [f"sha-256=:{DIGEST}:", f"sha-512=:{LONG}:, sha-256=:{DIGEST}:"])
def test_the_digest_of_the_body_is_found_in_its_header(header):
    assert code_of(check_digest, header, GOOD) is None


@pytest.mark.parametrize(
    "header", ["", "sha-256=::", f"sha-256=:{DIGEST[:-2]}A=:", f"md5=:{DIGEST}:", "sha-256=:====:"]
)
def test_another_digest_is_refused(header):
    assert code_of(check_digest, header, GOOD) == "digest_mismatch"
    assert code_of(check_digest, f"sha-256=:{DIGEST}:", GOOD[:-1]) == "digest_mismatch"


@pytest.mark.parametrize(
    ("update_id", "code"),
    [
        (new_update_id(NOW), None),
        (new_update_id(NOW + validate.ID_SKEW_S - 1), None),
        (new_update_id(NOW + validate.ID_SKEW_S + 1), "bad_update_id"),
        (new_update_id(NOW - validate.ID_WINDOW_S + 1), None),
        (new_update_id(NOW - validate.ID_WINDOW_S - 1), "update_id_expired"),
        ("01a3185c-5000-7abc-8abc-abcdefabcdef", None),
        ("01A3185C-5000-7ABC-8ABC-ABCDEFABCDEF", "bad_update_id"),
        ("01a3185c50007abc8abcabcdefabcdef", "bad_update_id"),
        ("01a3185c-5000-4abc-8abc-abcdefabcdef", "bad_update_id"),
        ("6ba7b810-9dad-11d1-80b4-00c04fd430c8", "bad_update_id"),
        ("../../etc/passwd", "bad_update_id"),
        ("", "bad_update_id"),
    ],
)
def test_an_update_id_is_a_recent_uuid_of_version_7_in_one_spelling(update_id, code):
    assert code_of(check_id, update_id, NOW) == code
