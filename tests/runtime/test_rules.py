"""Rule sets: a schema that only equal models share, a file that comes back bit for bit or not at all."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from fednl_runtime.errors import RulesError
from fednl_runtime.rules import RuleSet, in_range, load_rules, schema_hash

SHAPES = {"rule.0.conv": (6, 3), "rule.0.b_eta": (2,), "rule.top.step": ()}


def rules_of(shapes=None, fingerprint="f" * 64, seed=0):
    rng = np.random.default_rng(seed)
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in (shapes or SHAPES).items()}
    return RuleSet({name: np.asarray(value, np.float32) for name, value in tensors.items()}, fingerprint)


def test_the_schema_hash_ignores_order_and_sees_names_shapes_and_the_model():
    wanted = schema_hash(SHAPES, "a")
    assert schema_hash(dict(reversed(SHAPES.items())), "a") == wanted
    others = [
        schema_hash(SHAPES, "b"),
        schema_hash(SHAPES | {"rule.0.b_eta": (1, 2)}, "a"),
        schema_hash({**SHAPES, "rule.1.b_eta": (2,)}, "a"),
    ]
    assert len({wanted, *others}) == 4


def test_a_rule_set_comes_back_from_its_file_bit_for_bit(tmp_path):
    rules = rules_of()
    rules.save(tmp_path / "r.safetensors", {"text": "notes"})
    again, notes = load_rules(tmp_path / "r.safetensors")
    assert again.shapes == SHAPES
    assert (again.fingerprint, again.schema_hash, notes) == (rules.fingerprint, rules.schema_hash, {"text": "notes"})
    assert all(np.array_equal(again.tensors[name], value) for name, value in rules.tensors.items())


def test_a_file_that_is_no_rule_set_is_refused(tmp_path):
    path = tmp_path / "r.safetensors"
    with pytest.raises(RulesError, match="no set of rules"):
        load_rules(path)
    path.write_bytes(b"not safetensors")
    with pytest.raises(RulesError, match="no set of rules"):
        load_rules(path)
    save_file({"rule.0.b_eta": np.zeros(2, np.float32)}, path)
    with pytest.raises(RulesError, match="no set of rules"):
        load_rules(path)


def test_a_file_whose_rules_differ_from_its_schema_is_refused(tmp_path):
    path = tmp_path / "r.safetensors"
    tensors = {**rules_of().tensors, "rule.0.b_eta": np.zeros(3, np.float32)}
    save_file(tensors, path, {"fednl.fingerprint": "f" * 64, "fednl.schema": rules_of().schema_hash})
    with pytest.raises(RulesError, match="damaged"):
        load_rules(path)


def test_rules_of_another_model_or_shape_or_not_finite_are_refused():
    rules = rules_of()
    rules.require(SHAPES, rules.fingerprint)
    with pytest.raises(RulesError, match="another model"):
        rules.require(SHAPES, "e" * 64)
    with pytest.raises(RulesError, match="names or shapes"):
        rules.require(SHAPES | {"rule.1.conv": (6, 3)}, rules.fingerprint)
    rules.tensors["rule.0.conv"][3, 1] = np.nan
    with pytest.raises(RulesError, match=r"rule\.0\.conv holds numbers"):
        rules.require(SHAPES, rules.fingerprint)


def test_rates_stay_where_their_sigmoid_has_a_gradient():
    moved = in_range("rule.0.cms_step", np.array([-40.0, 0.5, 99.0], np.float32))
    assert moved.tolist() == [-12.0, 0.5, 12.0]
