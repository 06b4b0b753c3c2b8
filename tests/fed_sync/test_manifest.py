"""A manifest is believed only as it was signed, and only if a pinned key signed it."""

from __future__ import annotations

import base64
import dataclasses
import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from fednl_runtime.fed_sync.errors import Refusal
from fednl_runtime.fed_sync.manifest import PAYLOAD_TYPE, Manifest, open_manifest, sign_manifest

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))
MANIFEST = Manifest("p", 7, 6, "a" * 64, "b" * 64, 1234, 1_800_000_000, 1_900_000_000, "0.1.0", 5, "mean", 0.5, None)
SIGNED = sign_manifest(MANIFEST, KEY)


def test_a_manifest_comes_back_as_it_was_signed():
    assert open_manifest(SIGNED, [OTHER.public_key(), KEY.public_key()]) == MANIFEST


def test_the_envelope_is_dsse_that_anyone_can_check():
    envelope = json.loads(SIGNED)
    payload, kind = base64.b64decode(envelope["payload"]), PAYLOAD_TYPE.encode()
    signed = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
    assert envelope["payloadType"] == PAYLOAD_TYPE
    KEY.public_key().verify(base64.b64decode(envelope["signatures"][0]["sig"]), signed)
    assert json.loads(payload) == dataclasses.asdict(MANIFEST)


@pytest.mark.parametrize("keys", [[], [OTHER.public_key()]])
def test_a_key_that_is_not_pinned_is_not_believed(keys):
    with pytest.raises(Refusal, match="pinned"):
        open_manifest(SIGNED, keys)


def test_another_payload_or_type_under_the_signature_is_refused():
    envelope = json.loads(SIGNED)
    other = base64.b64encode(json.dumps({**dataclasses.asdict(MANIFEST), "version": 8}).encode()).decode()
    for change in ({"payload": other}, {"payloadType": "text/plain"}, {"signatures": []}):
        with pytest.raises(Refusal):
            open_manifest(json.dumps({**envelope, **change}), [KEY.public_key()])


@pytest.mark.parametrize("change", [{"version": "7"}, {"size": None}, {"rollback_of": 1.5}, {"population": 3}])
def test_a_signed_manifest_of_other_types_is_refused(change):
    with pytest.raises(Refusal, match="another type"):
        open_manifest(sign_manifest(dataclasses.replace(MANIFEST, **change), KEY), [KEY.public_key()])


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", "[" * 100_000, json.dumps({"payload": 1, "payloadType": 2, "signatures": [3]})]
)
def test_nonsense_is_refused(text):
    with pytest.raises(Refusal):
        open_manifest(text, [KEY.public_key()])


@given(position=st.integers(0, len(SIGNED) - 1), char=st.characters(codec="ascii"))
def test_a_changed_letter_is_refused_or_changes_nothing(position, char):
    text = SIGNED[:position] + char + SIGNED[position + 1 :]
    try:
        assert open_manifest(text, [KEY.public_key()]) == MANIFEST
    except Refusal:
        assert text != SIGNED
