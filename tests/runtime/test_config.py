"""Laws of the configuration: errors that say what to do, and a JSON round trip."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import TINY

from fednl_runtime.config import WHOLE, HopeConfig
from fednl_runtime.errors import ConfigError

FIELDS = [field.name for field in dataclasses.fields(HopeConfig)]
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda x: st.lists(x, max_size=3), max_leaves=5
)


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        *(({name: least - 1}, f"{name} is {least - 1}; it must be a whole number") for name, least in WHOLE.items()),
        ({"d_model": 6.0}, "must be a whole number"),
        ({"n_head": 4}, "must be a multiple of n_head, 4"),
        ({"layers": ()}, "give one or more of delta, self_modifying"),
        ({"layers": ("delta", "attention")}, "give one or more of delta, self_modifying"),
        ({"cms_periods": (0, 4)}, "each must be a whole number of at least 1"),
        ({"cms_periods": (4, 6)}, "each must be a multiple of the one before"),
        ({"eta_max": 0.0}, "must be a positive number"),
        ({"norm_cap": float("inf")}, "must be a positive number"),
        ({"error_clip": float("nan")}, "must be a positive number"),
        ({"log_alpha_min": 0.5}, "must be at most 0"),
    ],
)
def test_a_config_that_cannot_be_built_says_what_to_change(change, advice):
    with pytest.raises(ConfigError, match=advice):
        dataclasses.replace(TINY, **change)


@pytest.mark.parametrize("config", [TINY, HopeConfig(vocab_size=257, cms_periods=(), top_rank=0)], ids=["tiny", "bare"])
def test_json_round_trip_is_the_identity(config):
    assert HopeConfig.from_json(config.to_json()) == config


def test_a_field_of_a_newer_version_is_refused_by_name():
    newer = json.dumps(json.loads(TINY.to_json()) | {"d_future": 1})
    with pytest.raises(ConfigError, match=r"d_future.*newer fednl-runtime"):
        HopeConfig.from_json(newer)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '"text"', "{}"])
def test_json_that_is_no_config_is_a_config_error(text):
    with pytest.raises(ConfigError):
        HopeConfig.from_json(text)


@given(st.sampled_from(FIELDS), ANY_JSON)
def test_any_json_value_in_any_field_loads_or_is_a_config_error(name, value):
    text = json.dumps(json.loads(TINY.to_json()) | {name: value})
    with contextlib.suppress(ConfigError):
        assert HopeConfig.from_json(text).n_layer >= 1


def test_derived_widths_follow_from_the_fields():
    assert (TINY.n_layer, TINY.d_head, TINY.n_cms) == (2, 3, 2)
