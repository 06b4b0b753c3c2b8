"""An upload says what it is meant to say, loses nothing that is not kept, and hostile ones are refused."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from updates import HOSTILE, RULES, SCHEMA, body_of, update_of

from fednl_runtime.fed_sync.errors import Refusal
from fednl_runtime.fed_sync.tensors import pack, unpack
from fednl_runtime.fed_sync.update import ENCODINGS, FACTS, decode, encode, new_update_id

ROOT = Path(__file__).parents[2]
finite = st.floats(-1e4, 1e4, width=32)


@pytest.mark.parametrize(("encoding", "error"), [("f32", 0), ("f16", 2**-11), ("int8", 0.5 / 127 * 1.001)])
def test_what_is_decoded_is_what_was_encoded(encoding, error):
    update = update_of()
    decoded = decode(body_of(update, encoding), SCHEMA)
    for name, value in update.delta.items():
        assert np.abs(decoded.delta[name] - value).max() <= error * np.abs(value).max()
    assert dataclasses.replace(decoded, delta=update.delta) == update


def test_topk_sends_the_largest_numbers_and_nothing_else():
    update = update_of()
    sent = SCHEMA.vector(decode(encode(update, SCHEMA, "topk", keep=0.2).body, SCHEMA).delta)
    exact = np.abs(SCHEMA.vector(update.delta))
    largest = np.argsort(exact)[-np.ceil(0.2 * SCHEMA.size).astype(int) :]
    assert set(np.flatnonzero(sent)) <= set(largest)
    np.testing.assert_allclose(np.abs(sent[largest]), exact[largest], atol=exact.max() / 127)


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(vector=hnp.arrays(np.float32, SCHEMA.size, elements=finite))
def test_sent_and_residual_are_the_difference_bit_for_bit(encoding, vector):
    update = dataclasses.replace(update_of(), delta=SCHEMA.tensors(vector))
    encoded = encode(update, SCHEMA, encoding)
    sent = decode(encoded.body, SCHEMA).delta
    for name, value in update.delta.items():
        assert (sent[name] + encoded.residual[name] == value).all()


def test_an_upload_holds_the_six_facts_the_rules_and_no_other_byte():
    update = update_of()
    body = body_of(update)
    length = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + length])
    assert header.pop("__metadata__") == {name: str(getattr(update, name)) for name in FACTS}
    offset = 0
    for name, entry in header.items():
        size = update.delta[name].nbytes
        assert entry == {"dtype": "F32", "shape": list(SCHEMA.shapes[name]), "data_offsets": [offset, offset + size]}
        assert body[8 + length + offset :][:size] == update.delta[name].tobytes()
        offset += size
    assert sorted(header) == SCHEMA.names
    assert len(body) == 8 + length + offset
    spaces = body[8 : 8 + length].rpartition(b"}")[2]
    assert spaces == b" " * len(spaces)
    assert len(spaces) < 8


def test_the_same_update_has_the_same_bytes_in_another_process_and_another_order():
    code = "from updates import *; import hashlib; print(hashlib.sha256(GOOD).hexdigest())"
    environment = {"PYTHONPATH": str(ROOT / "tests"), "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    turned = dataclasses.replace(update_of(), delta=dict(reversed(update_of().delta.items())))
    assert hashlib.sha256(body_of(turned)).hexdigest() == other.stdout.strip()


def test_views_that_are_not_contiguous_travel_unharmed():
    whole = np.arange(15, dtype=np.float32).reshape(3, 5)
    views = {"a": whole.T, "b": whole[::-1, ::2], "c": np.broadcast_to(np.float32(7), (4, 2)), "d": whole[:0]}
    arrays, _ = unpack(pack(views, {}))
    assert all((arrays[name] == view).all() and arrays[name].shape == view.shape for name, view in views.items())


@pytest.mark.parametrize("encoding", ["f32", "f16", "int8", "topk"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_difference_that_is_not_finite_is_not_encoded(encoding, value):
    delta = {**update_of().delta, "rule.top.decay": np.float32(value).reshape(())}
    with pytest.raises(Refusal, match="not finite"):
        encode(dataclasses.replace(update_of(), delta=delta), SCHEMA, encoding)


def test_a_number_too_large_for_f16_is_refused_on_the_device():
    with pytest.raises(Refusal, match="not finite"):
        encode(update_of(size=1e6), SCHEMA, "f16")


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_body_gets_its_code(what):
    code, body = HOSTILE[what]
    with pytest.raises(Refusal) as refused:
        decode(body, SCHEMA)
    assert refused.value.code == code


TOPK = unpack(body_of(update_of(), "topk"))


@pytest.mark.parametrize(
    ("part", "value", "code"),
    [
        ("mask", np.full_like(TOPK[0]["mask"], 255), "wrong_shape"),
        ("mask", TOPK[0]["mask"][:-1], "wrong_shape"),
        ("values", TOPK[0]["values"][:-1], "wrong_shape"),
        ("values", TOPK[0]["values"].astype(np.float32), "wrong_dtype"),
        ("scale", np.full_like(TOPK[0]["scale"], np.inf), "not_finite"),
        ("scale", np.full_like(TOPK[0]["scale"], 3e38), "not_finite"),
        ("scale", TOPK[0]["scale"][:-1], "wrong_shape"),
        ("more", TOPK[0]["scale"], "wrong_names"),
    ],
)
def test_a_topk_form_that_does_not_add_up_is_refused(part, value, code):
    with pytest.raises(Refusal) as refused:
        decode(pack({**TOPK[0], part: value}, TOPK[1]), SCHEMA)
    assert refused.value.code == code


@given(position=st.integers(0, len(body_of(update_of())) - 1), byte=st.integers(0, 255), cut=st.integers(0, 40))
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_damaged_body_is_refused_or_is_a_whole_update(encoding, position, byte, cut):
    body = bytearray(body_of(update_of(), encoding))
    body[position % len(body)] = byte
    try:
        delta = decode(bytes(body[: len(body) - cut]), SCHEMA).delta
    except Refusal:
        return
    assert {name: value.shape for name, value in delta.items()} == SCHEMA.shapes
    assert all(np.isfinite(value).all() for value in delta.values())


@given(body=st.binary(max_size=300))
def test_any_bytes_are_refused_by_a_code(body):
    with pytest.raises(Refusal):
        decode(body, SCHEMA)


def test_a_vector_holds_every_number_of_every_rule_once():
    vector = np.arange(SCHEMA.size, dtype=np.float64)
    assert (SCHEMA.vector(SCHEMA.tensors(vector)) == vector).all()
    assert SCHEMA.size == sum(value.size for value in RULES.tensors.values())


@given(now=st.floats(0, 1e10))
def test_an_update_id_is_a_uuid_of_version_7_that_tells_the_time(now):
    parsed = uuid.UUID(new_update_id(now))
    assert (parsed.version, parsed.variant) == (7, uuid.RFC_4122)
    assert parsed.int >> 80 == int(now * 1000)


def test_update_ids_do_not_repeat():
    assert len({new_update_id(1e9) for _ in range(1000)}) == 1000


def test_nothing_in_the_federation_unpickles():
    for path in (ROOT / "fed_sync").rglob("*.py"):
        names = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert not [n for n in names if {"pickle", "marshal", "shelve"} & {a.name for a in n.names}], path
