"""A signature stands for one request of one key at one time; keys are kept from other eyes."""

from __future__ import annotations

import stat

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from starlette.requests import Request

from fednl_runtime.fed_sync.errors import Refusal, SigningKeyError
from fednl_runtime.fed_sync.signing import (
    MAX_SKEW_S,
    key_file,
    key_id,
    public_key,
    public_text,
    sign_request,
    sign_text,
    verify_request,
    verify_text,
)

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))
NOW = 1_800_000_000.0
URL = "https://fleet.example/v1/populations/p/updates/u?x=1"


def signed(body: bytes | None = b"hello", method: str = "PUT", key: Ed25519PrivateKey = KEY) -> httpx.Request:
    headers = {} if body is None else {"content-type": "text/plain"}
    request = httpx.Request(method, URL, content=body, headers=headers)
    sign_request(request, key, body, NOW)
    return request


def code_of(request: object, has_body: bool = True, now: float = NOW, known: Ed25519PrivateKey = KEY) -> str | None:
    keys = {key_id(known.public_key()): known.public_key()}
    try:
        verify_request(request, keys.get, has_body, now)
    except Refusal as refusal:
        return refusal.code
    return None


def test_a_signed_request_tells_its_key():
    assert verify_request(signed(), lambda _: KEY.public_key(), True, NOW) == key_id(KEY.public_key())
    assert code_of(signed(None, "GET"), has_body=False) is None


def test_the_server_reads_what_the_client_signed():
    request = signed()
    scope = {
        "type": "http",
        "method": "PUT",
        "scheme": "https",
        "path": request.url.path,
        "raw_path": request.url.raw_path,
        "query_string": b"x=1",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
    }
    assert code_of(Request(scope)) is None


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("method", "POST"),
        ("url", httpx.URL(URL.replace("fleet", "other"))),
        ("url", httpx.URL(URL.replace("/p/", "/q/"))),
        ("url", httpx.URL(URL.replace("x=1", "x=2"))),
    ],
)
def test_a_changed_request_is_refused(part, value):
    request = signed()
    setattr(request, part, value)
    assert code_of(request) == "bad_signature"


@pytest.mark.parametrize("name", ["content-digest", "content-type"])
def test_a_changed_or_missing_header_of_the_body_is_refused(name):
    changed, missing = signed(), signed()
    changed.headers[name] += "x"
    del missing.headers[name]
    assert (code_of(changed), code_of(missing)) == ("bad_signature", "bad_signature")


@pytest.mark.parametrize(
    "value", ["", "fednl=()", "fednl=:AAAA:", "x" * 5000, 'fednl=("@method");created=1;tag="fednl"']
)
@pytest.mark.parametrize("name", ["signature", "signature-input"])
def test_nonsense_for_a_signature_is_refused(name, value):
    request = signed()
    request.headers[name] = value
    assert code_of(request) == "bad_signature"


def test_an_unknown_key_is_refused():
    assert code_of(signed(key=OTHER)) == "bad_signature"


def test_a_signature_without_the_body_is_refused_where_a_body_is_due():
    request = httpx.Request("PUT", URL, content=b"hello", headers={"content-type": "text/plain"})
    sign_request(request, KEY, None, NOW)
    assert code_of(request) == "bad_signature"


def test_a_signature_with_another_tag_is_refused():
    request = signed()
    request.headers["signature-input"] = request.headers["signature-input"].replace('tag="fednl"', 'tag="other"')
    assert code_of(request) == "bad_signature"


@pytest.mark.parametrize("skew", [-MAX_SKEW_S - 1, MAX_SKEW_S + 1, -NOW, 3e8])
def test_a_wrong_clock_is_told_from_a_wrong_key(skew):
    assert code_of(signed(), now=NOW + skew) == "clock_skew"
    assert code_of(signed(key=OTHER), now=NOW + skew) == "bad_signature"


@pytest.mark.parametrize("skew", [-MAX_SKEW_S, MAX_SKEW_S])
def test_five_minutes_of_skew_are_allowed(skew):
    assert code_of(signed(), now=NOW + skew) is None


def test_a_key_file_is_made_once_and_for_its_owner_only(tmp_path):
    path = tmp_path / "signing.key"
    first = key_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key_file(path).private_bytes_raw() == first.private_bytes_raw()
    assert [entry.name for entry in tmp_path.iterdir()] == ["signing.key"]


def test_a_key_file_that_others_can_read_is_refused(tmp_path):
    key_file(tmp_path / "k")
    (tmp_path / "k").chmod(0o644)
    with pytest.raises(SigningKeyError, match="chmod 600"):
        key_file(tmp_path / "k")


@pytest.mark.parametrize("kind", ["text", "curve", "password"])
def test_a_file_that_is_no_key_is_refused(tmp_path, kind):
    from cryptography.hazmat.primitives.serialization import BestAvailableEncryption

    curve = ec.generate_private_key(ec.SECP256R1())
    content = {
        "text": b"hello",
        "curve": curve.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        "password": KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"x")),
    }
    path = tmp_path / "k"
    path.write_bytes(content[kind])
    path.chmod(0o600)
    with pytest.raises(SigningKeyError):
        key_file(path)


def test_a_public_key_survives_its_text():
    assert public_key(public_text(KEY.public_key())).public_bytes_raw() == KEY.public_key().public_bytes_raw()


@pytest.mark.parametrize("text", ["", "hello", "AAAA", "é", "A" * 43, "A" * 88])
def test_a_text_that_is_no_public_key_is_refused(text):
    with pytest.raises(Refusal, match="32 bytes"):
        public_key(text)


def test_a_proof_fits_one_text_and_one_key():
    proof = sign_text("a", KEY)
    verify_text("a", proof, KEY.public_key())
    for text, signature, key in [("b", proof, KEY), ("a", proof, OTHER), ("a", "x", KEY), ("a", "é", KEY)]:
        with pytest.raises(Refusal, match="proof"):
            verify_text(text, signature, key.public_key())
