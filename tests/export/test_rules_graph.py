"""The gradient graph equals torch's autograd, and its state that of the model it belongs to."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from models import TINY, random_params, random_state, random_tokens
from onnx import helper, numpy_helper

from fednl_runtime.backend import LEARN
from fednl_runtime.errors import RulesError
from fednl_runtime.export import verify
from fednl_runtime.export.autodiff import backward
from fednl_runtime.export.graph import IR, OPSET, export_model
from fednl_runtime.export.ops import Ops, typed
from fednl_runtime.export.rules_graph import build_rules_model, export_rules
from fednl_runtime.export.segment_ops import SegmentOps
from fednl_runtime.export.verify import file_parameters
from fednl_runtime.export.weights import rule_name, stored
from fednl_runtime.gradient_backend import load_gradients
from fednl_runtime.hope import Hope, to_tensors
from fednl_runtime.model_file import default_model_path
from fednl_runtime.onnx_backend import load, session_options
from fednl_runtime.state import MemoryState

BASE = dataclasses.replace(TINY, d_model=10, cms_periods=(4, 12), top_period=8, memory_period=4)
CONFIGS = {
    "both profiles": BASE,
    "delta": dataclasses.replace(BASE, layers=("delta",)),
    "self-modifying": dataclasses.replace(BASE, layers=("self_modifying",), error_clip=0.5, eta_max=0.7),
    "one level": dataclasses.replace(BASE, cms_periods=(4,), memory_period=12),
    "segments of one token": dataclasses.replace(BASE, cms_periods=(1, 3), top_period=2, memory_period=2),
    "an odd segment": dataclasses.replace(BASE, cms_periods=(5, 10), top_period=5, memory_period=10),
    "no levels": dataclasses.replace(BASE, cms_periods=(), top_rank=0),
    "nothing slow": dataclasses.replace(BASE, layers=("delta",), cms_periods=(), top_rank=0, memory_period=4),
}


def params_of(config, seed=0):
    """Random parameters that are exact in fp32; rates as small as training leaves them."""
    params = random_params(config, seed)
    calm = {n: v - 1.5 for n, v in params.items() if n.endswith("step")}
    return {n: np.asarray(v, np.float32).astype(np.float64) for n, v in (params | calm).items() if np.size(v)}


def start(config, position):
    """A state with no zeros, exact in fp32."""
    state = random_state(config, 1, position=position)
    return MemoryState({n: t.astype(np.float32) for n, t in state.tensors.items()}, state.position)


def graphs(config, folder, seed=0):
    """The gradient graph and the serving graph of a tiny model."""
    export_model(params_of(config, seed), config, "{}", folder / "model.onnx")
    export_rules(params_of(config, seed), config, folder / "model.onnx")
    return load_gradients(folder / "model.onnx", 1), load(folder / "model.onnx", 1)


def autograd(config, tokens, state, params, dtype=torch.float64):
    """Loss, gradients of the rules and next state by torch."""
    model = Hope(config).to(dtype)
    own = model.state_dict()
    model.load_state_dict({name: torch.tensor(params[name]).expand(own[name].shape) for name in own})
    past = {n: t if n == "position" else t.to(dtype) for n, t in to_tensors(state).items()}
    ids = torch.tensor(tokens)
    logits, present = model(ids[:, :-1], past)
    loss = torch.nn.functional.cross_entropy(logits[0], ids[0, 1:])
    loss.backward()
    gradients = {rule: p.grad.numpy() for n, p in model.named_parameters() if (rule := rule_name(n))}
    return float(loss.detach()), gradients, {n: t.detach().numpy() for n, t in present.items()}


def relative(found, wanted):
    """Largest difference over the largest magnitude."""
    return float(np.abs(found - wanted).max() / max(np.abs(wanted).max(), 1e-12))


def doubled(graph):
    """The same graph in float64, loops included, in place; onnxruntime's Softplus is for float32 only."""
    for tensor in list(graph.initializer):
        if tensor.data_type == onnx.TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i == onnx.TensorProto.FLOAT:
                attribute.i = onnx.TensorProto.DOUBLE
            if attribute.HasField("g"):
                doubled(attribute.g)
    nodes = []
    for node in graph.node:
        if node.op_type == "Softplus":
            (x,), (y,) = node.input, node.output
            nodes.append(helper.make_node("Exp", [x], [f"{y}/exp"]))
            nodes.append(helper.make_node("Constant", [], [f"{y}/one"], value=numpy_helper.from_array(np.ones(()))))
            nodes.append(helper.make_node("Add", [f"{y}/exp", f"{y}/one"], [f"{y}/sum"]))
            node = helper.make_node("Log", [f"{y}/sum"], [y])
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def in_float64(params, config, tokens, state, monkeypatch):
    """Every output of the gradient graph, built and run in float64, where rounding cannot hide a wrong term."""
    const = Ops.const
    monkeypatch.setattr(Ops, "const", lambda ops, x, dtype=np.float64: const(ops, x, dtype))
    model = build_rules_model(params, config)
    doubled(model.graph)
    session = ort.InferenceSession(model.SerializeToString(), session_options(1))
    feeds = {name: value for name, value in stored(params).items() if name.startswith("rule.")}
    feeds |= {f"past.{name}": value for name, value in state.tensors.items()}
    feeds = {name: value.astype(np.float64) for name, value in feeds.items()}
    names = [output.name for output in session.get_outputs()]
    found = session.run(names, {"tokens": tokens, "position": state.position, **feeds})
    return dict(zip(names, found, strict=True))


def assert_equal_to_autograd(found, params, config, tokens, state, bound):
    loss, gradients, present = autograd(config, tokens, state, params)
    wanted = {"loss": loss} | {f"gradient.{n}": g for n, g in gradients.items()}
    wanted |= {f"present.{n}": t for n, t in present.items() if n != "position"}
    assert found.keys() == wanted.keys()
    assert {n: e for n, value in found.items() if not (e := relative(value, wanted[n])) < bound} == {}


@pytest.mark.parametrize("position", [0, 20, 60])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_gradient_equals_autograd_from_a_state_that_is_not_zero(config, position, monkeypatch):
    state, tokens = start(config, position), random_tokens(config, 1, 48 // config.segment * config.segment + 1)
    found = in_float64(params_of(config), config, tokens, state, monkeypatch)
    assert_equal_to_autograd(found, params_of(config), config, tokens, state, 1e-8)


def shipped_case():
    """Parameters and configuration of the shipped model, a window over boundaries of every level, its start."""
    params, config = file_parameters(default_model_path()), load(default_model_path(), 1).config
    rng = np.random.default_rng(0)
    state = verify.random_state(rng, config, np.array([4096 - 64]))
    return params, config, rng.integers(0, config.vocab_size, (1, 129)), state


def test_every_gradient_of_the_shipped_model_equals_autograd(monkeypatch):
    params, config, tokens, state = shipped_case()
    found = in_float64(params, config, tokens, state, monkeypatch)
    assert_equal_to_autograd(found, params, config, tokens, state, 1e-9)


def test_the_shipped_gradient_graph_rounds_no_more_than_torch_does_in_float32():
    params, config, tokens, state = shipped_case()
    graph = load_gradients(default_model_path(), 1)
    _, found, _ = graph.step(graph.defaults.tensors, tokens[0], state)
    exact, torchs = (autograd(config, tokens, state, params, t)[1] for t in (torch.float64, torch.float32))
    ours, theirs = (max(relative(gradients[n], exact[n]) for n in exact) for gradients in (found, torchs))
    assert ours < max(1e-5, 2 * theirs)
    assert ours < 1e-4


def rules_of(config, seed=0):
    return {name: value for name, value in stored(params_of(config, seed)).items() if name.startswith("rule.")}


def test_no_rule_of_a_whole_model_has_a_zero_gradient(tmp_path):
    state, tokens = start(BASE, 12), random_tokens(BASE, 1, 25)
    _, gradients, _ = graphs(BASE, tmp_path)[0].step(rules_of(BASE), tokens[0], state)
    assert [name for name, g in gradients.items() if not np.abs(g).max() > 0] == []


def test_one_graph_reads_windows_of_any_number_of_segments_and_carries_on(tmp_path):
    graph, _ = graphs(BASE, tmp_path)
    tokens, rules = random_tokens(BASE, 1, 25)[0], rules_of(BASE)
    whole = graph.step(rules, tokens, start(BASE, 4))
    first = graph.step(rules, tokens[:9], start(BASE, 4))
    second = graph.step(rules, tokens[8:], first[2])
    assert whole[0] == pytest.approx((8 * first[0] + 16 * second[0]) / 24, rel=1e-6)
    assert all(relative(t, whole[2].tensors[n]) < 1e-5 for n, t in second[2].tensors.items())


def test_the_state_it_leaves_is_the_one_that_serving_leaves(tmp_path):
    graph, backend = graphs(BASE, tmp_path)
    tokens = random_tokens(BASE, 1, 21)
    stream = backend.open(start(BASE, 4))
    for i in range(0, 20, 4):
        stream.feed(tokens[:, i : i + 4], np.array([LEARN], np.float32))
    _, _, present = graph.step(rules_of(BASE), tokens[0], start(BASE, 4))
    found = stream.snapshot().tensors
    assert all(relative(t, found[n]) < 1e-5 for n, t in present.tensors.items())


def test_other_rules_need_no_other_file(tmp_path):
    graph, _ = graphs(BASE, tmp_path)
    tokens, state = random_tokens(BASE, 1, 9)[0], start(BASE, 0)
    losses = [graph.step(rules_of(BASE, seed), tokens, state)[0] for seed in (0, 5)]
    assert abs(losses[0] - losses[1]) > 1e-3


def test_the_defaults_are_the_rules_of_the_model_file(tmp_path):
    graph, backend = graphs(BASE, tmp_path)
    graph.defaults.require(backend.model.rules, backend.fingerprint)
    assert all(np.array_equal(value, rules_of(BASE)[name]) for name, value in graph.defaults.tensors.items())


def test_large_weights_are_read_from_the_model_file(tmp_path):
    config = dataclasses.replace(BASE, vocab_size=500)
    graphs(config, tmp_path)
    stored_here = onnx.load(tmp_path / "model.rules.onnx", load_external_data=False).graph.initializer
    embedding = next(tensor for tensor in stored_here if tensor.name == "embedding")
    assert embedding.data_location == onnx.TensorProto.EXTERNAL
    assert not embedding.raw_data


def test_a_gradient_graph_of_another_model_file_is_refused(tmp_path):
    graphs(BASE, tmp_path)
    export_model(params_of(BASE, seed=1), BASE, "{}", tmp_path / "model.onnx")
    with pytest.raises(RulesError, match="another model file"):
        load_gradients(tmp_path / "model.onnx", 1)


def test_a_missing_or_damaged_gradient_graph_is_refused(tmp_path):
    graphs(BASE, tmp_path)
    path = tmp_path / "model.rules.onnx"
    whole = path.read_bytes()
    path.unlink()
    with pytest.raises(RulesError, match="There is no gradient graph"):
        load_gradients(tmp_path / "model.onnx", 1)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RulesError, match="does not fit"):
        load_gradients(tmp_path / "model.onnx", 1)
    path.write_bytes(whole.replace(b"fednl.rules_format", b"fednl.rules_farmat"))
    with pytest.raises(RulesError, match="damaged"):
        load_gradients(tmp_path / "model.onnx", 1)


def test_the_graph_has_standard_operators_and_as_many_nodes_for_any_window():
    model = build_rules_model(params_of(BASE), BASE)
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node].count("Scan") == 2


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 21])
def test_the_inverse_is_stable_for_keys_that_are_all_the_same(n):
    """Powers of this matrix reach binomial coefficients; its inverse has nothing above 1."""
    ops = SegmentOps(n)
    out = ops.inverse("x")
    constants = list(ops.initializers.values())
    graph = helper.make_graph(ops.nodes, "inverse", [typed("x", (1, n, n))], [typed(out)], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)
    x = np.full((1, n, n), 0.999, np.float32)
    (found,) = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    wanted = np.linalg.inv(np.eye(n) + np.tril(x[0].astype(np.float64), -1))
    assert np.abs(found[0] - wanted).max() < 1e-6


def test_an_operator_without_a_gradient_is_our_own_mistake():
    ops = SegmentOps(1)
    out = ops("Cos", "x")
    with pytest.raises(AssertionError, match="Cos has no gradient"):
        backward(ops, list(ops.nodes), {"x": (1,), out: (1,)}, {out: "g"}, ["x"])
