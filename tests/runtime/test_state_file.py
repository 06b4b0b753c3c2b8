"""Laws of state files: exact, and refused whole if anything in them is wrong."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from models import TINY, random_state

from fednl_runtime.errors import StateError
from fednl_runtime.history import Mark
from fednl_runtime.session import Session, SessionKey
from fednl_runtime.state import MemoryState
from fednl_runtime.state_file import FIELDS, StateFormat, checksum, parse

FORM = StateFormat(TINY, "model", "tokenizer")
KEY = SessionKey("owner", "name")


def version(seed: int = 1) -> tuple[Session, Mark]:
    state = random_state(TINY, seed=seed, position=5)
    tensors = {name: tensor.astype(np.float32) for name, tensor in state.tensors.items()}
    logits = np.random.default_rng(seed).normal(size=TINY.vocab_size).astype(np.float32)
    mark = Mark(version=3, content=3, parent=2, anchor=1, tokens_seen=5, tokens=4, length=9, name="before lunch")
    return Session(KEY, MemoryState(tensors, state.position), 3, logits, b"\xe2\x82"), mark


SESSION, MARK = version()
FILE = FORM.encode(SESSION, MARK)


def rewritten(**fields: str) -> bytes:
    """The file with other header fields and a checksum that fits them."""
    header, tensors = parse(FILE)
    header.pop("checksum")
    header |= fields
    return safetensors.numpy.save(tensors, {**header, "checksum": checksum(header, tensors)})


def test_a_version_comes_back_bit_for_bit():
    session, mark = FORM.decode(FILE, KEY)
    assert mark == MARK
    assert (session.key, session.version, session.tail) == (KEY, 3, b"\xe2\x82")
    np.testing.assert_array_equal(session.logits, SESSION.logits)
    np.testing.assert_array_equal(session.state.position, SESSION.state.position)
    for name, tensor in SESSION.state.tensors.items():
        np.testing.assert_array_equal(session.state.tensors[name], tensor)


def test_a_version_that_has_read_nothing_has_no_logits():
    fresh = Session(KEY, MemoryState.zeros(TINY))
    assert FORM.decode(FORM.encode(fresh, Mark()), KEY)[0].logits is None


def test_a_file_fits_the_room_set_aside_for_it():
    assert len(FILE) < FORM.max_bytes


@pytest.mark.parametrize(("field", "value"), [("fingerprint", "other"), ("tokenizer", "other")])
def test_a_file_of_another_model_or_tokenizer_is_refused(field, value):
    with pytest.raises(StateError, match="belongs to another"):
        dataclasses.replace(FORM, **{field: value}).decode(FILE, KEY)


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_a_changed_header_field_is_refused(field):
    header, tensors = parse(FILE)
    changed = {**header, field: header[field] + "1"}
    with pytest.raises(StateError):
        FORM.decode(safetensors.numpy.save(tensors, changed), KEY)


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_a_missing_header_field_is_refused(field):
    header, tensors = parse(FILE)
    header.pop(field)
    with pytest.raises(StateError):
        FORM.decode(safetensors.numpy.save(tensors, header), KEY)


@pytest.mark.parametrize(
    "fields",
    [
        {"format": "2"},
        {"format": "x"},
        {"position": "6"},
        {"position": "-5"},
        {"position": "five"},
        {"tail": "zz"},
        {"mark": "{}"},
        {"mark": "[]"},
        {"mark": "not JSON"},
        {"mark": json.dumps({**dataclasses.asdict(MARK), "version": -1})},
        {"mark": json.dumps({**dataclasses.asdict(MARK), "version": "3"})},
        {"mark": json.dumps({**dataclasses.asdict(MARK), "extra": 3})},
    ],
)
def test_a_header_that_makes_no_sense_is_refused_though_its_checksum_fits(fields):
    with pytest.raises(StateError):
        FORM.decode(rewritten(**fields), KEY)


def test_a_tensor_that_is_missing_strange_or_not_finite_is_refused():
    header, tensors = parse(FILE)
    header.pop("checksum")
    name = next(iter(SESSION.state.tensors))
    for damaged in (
        {n: t for n, t in tensors.items() if n != name},
        {**tensors, "stranger": np.zeros(3, np.float32)},
        {**tensors, name: tensors[name] * np.nan},
        {**tensors, name: tensors[name].astype(np.float64)},
        {**tensors, name: tensors[name][:, :-1]},
        {**tensors, name: np.concatenate([tensors[name]] * 2)},
        {**tensors, "logits": tensors["logits"][:, :-1]},
    ):
        tensors_now = {n: np.ascontiguousarray(t) for n, t in damaged.items()}
        data = safetensors.numpy.save(tensors_now, {**header, "checksum": checksum(header, tensors_now)})
        with pytest.raises(StateError):
            FORM.decode(data, KEY)


def test_an_oversized_file_is_refused_before_it_is_read():
    with pytest.raises(StateError, match="at most"):
        FORM.decode(FILE + bytes(FORM.max_bytes), KEY)


@given(st.integers(0, len(FILE) - 1))
def test_a_file_cut_short_anywhere_is_refused(length):
    with pytest.raises(StateError):
        FORM.decode(FILE[:length], KEY)


@given(st.integers(0, len(FILE) - 1), st.integers(1, 255))
def test_a_flipped_byte_anywhere_is_refused_or_changes_nothing(place, flip):
    damaged = bytearray(FILE)
    damaged[place] ^= flip
    try:
        session, mark = FORM.decode(bytes(damaged), KEY)
    except StateError:
        return
    assert mark == MARK
    assert all(np.array_equal(t, session.state.tensors[name]) for name, t in SESSION.state.tensors.items())


@given(st.binary(max_size=300))
def test_any_bytes_are_refused(data):
    with pytest.raises(StateError):
        FORM.decode(data, KEY)
