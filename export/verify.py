"""A model file against the law: random states, any split, every adapt setting, save and restore."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fednl_runtime import reference
from fednl_runtime.backend import segments
from fednl_runtime.config import HopeConfig
from fednl_runtime.errors import VerificationError
from fednl_runtime.export.quantize import file_parameters, with_exact_activations
from fednl_runtime.export.weights import Weights, fingerprint
from fednl_runtime.onnx_backend import OnnxBackend, load
from fednl_runtime.state import Array, MemoryState, Tokens

BOUND = 1e-4
"""Largest absolute difference in fp32, logits and states."""

LONG = 2048
"""Tokens of the long stream: enough for an unstable memory to blow a rounding error up."""

LONG_BOUND = 1e-2
"""Largest difference of its logits: rounding adds up to 1e-5, untrained to 4e-4; instability to 0.09 and more."""

ROUNDED_BOUND = 0.5
"""The same for a file that rounds its activations to 8 bits: a last bit that falls elsewhere moves a rounded number."""

ADAPTS = ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.5, 0.5))
Outcome = tuple[Array, MemoryState]
"""Logits `[B, T, V]` and the state after them."""

Law = Callable[[Tokens, MemoryState, Array], Outcome]


@dataclasses.dataclass(frozen=True)
class Case:
    """Tokens `[B, T]` to read from a state, in calls of the lengths `cuts`."""

    name: str
    tokens: Tokens
    state: MemoryState
    adapt: Array
    cuts: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Check:
    """One comparison: `ok` when `value` is at most `bound`."""

    name: str
    value: float
    bound: float

    @property
    def ok(self) -> bool:
        """Whether the check holds; a value that is not a number does not."""
        return self.value <= self.bound


@dataclasses.dataclass(frozen=True)
class Report:
    """All checks of a file, and the largest difference of each tensor."""

    checks: tuple[Check, ...]
    tensors: dict[str, float]

    @property
    def ok(self) -> bool:
        """Whether every check holds."""
        return all(check.ok for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        state = [value for name, value in self.tensors.items() if name != "logits"]
        checks = [{"name": c.name, "ok": c.ok, "value": c.value, "bound": c.bound} for c in self.checks]
        largest = {"max_abs_logits": self.tensors.get("logits", 0.0), "max_abs_state": max(state, default=0.0)}
        return {"ok": self.ok, **largest, "checks": checks, "tensors": self.tensors}


def verify(path: str | Path, checkpoint: str | Path | None = None, bound: float = BOUND, threads: int = 1) -> Report:
    """Compare a model file with the law (and with torch on `checkpoint`) on states that are not zero.

    A quantised file is held to the law of its rounded weights with exact activations; `quantize` measures
    what rounding them costs.

    Raises:
        ModelFileError, CheckpointError: a file cannot be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        exact = Path(folder) / "exact.onnx"
        with_exact_activations(Path(path), exact)
        backend, served = load(exact, threads), load(path, threads)
    params = file_parameters(path)
    checks = [Check("fingerprint", float(fingerprint(params, backend.config) != backend.fingerprint), 0)]
    laws = {"law": law_of(params, backend.config, np.float64), "fp32": law_of(params, backend.config, np.float32)}
    if checkpoint is not None:
        expected, laws["torch"] = checkpoint_law(checkpoint)
        checks.append(Check("checkpoint fingerprint", float(expected != backend.fingerprint), 0))
    tensors: dict[str, float] = {}
    for case in cases(backend):
        checks += judged(case, backend, laws, bound, tensors)
    checks += [frozen(served), resumed(served), reread(backend)]
    if "quantization" in served.model.metadata:
        checks.append(reread(served, ROUNDED_BOUND))
    return Report(tuple(checks), tensors)


def require(report: Report) -> None:
    """Raise VerificationError unless every check of the report holds."""
    if failed := [check.name for check in report.checks if not check.ok]:
        raise VerificationError(f"The model file differs from the law in {', '.join(failed)}. Do not use it.")


def law_of(params: Weights, c: HopeConfig, dtype: npt.DTypeLike) -> Law:
    """The NumPy law computed in `dtype`."""
    own = {name: value.astype(dtype) for name, value in params.items()}

    def law(tokens: Tokens, state: MemoryState, adapt: Array) -> Outcome:
        tensors = {name: value.astype(dtype) for name, value in state.tensors.items()}
        return reference.run(own, c, tokens, MemoryState(tensors, state.position), adapt.astype(dtype))

    return law


def checkpoint_law(path: str | Path) -> tuple[str, Law]:
    """The fingerprint of a checkpoint, and its literal step in torch."""
    import torch

    from fednl_runtime.export.checkpoint import load_checkpoint
    from fednl_runtime.hope import Hope, to_arrays, to_tensors
    from fednl_runtime.hope_step import step

    config, params, _ = load_checkpoint(Path(path))
    model = Hope(config)
    model.load_state_dict({name: torch.tensor(value) for name, value in params.items()})

    def law(tokens: Tokens, state: MemoryState, adapt: Array) -> Outcome:
        tensors, scales, logits = to_tensors(state), torch.tensor(adapt), []
        with torch.no_grad():
            for token in torch.tensor(tokens).unbind(1):
                row, tensors = step(model, token, tensors, scales)
                logits.append(row.numpy())
        return np.stack(logits, 1), to_arrays(tensors)

    return fingerprint(params, config), law


def cases(backend: OnnxBackend) -> Iterator[Case]:
    """Every adapt setting at batch 1 and 3 in random calls, and calls of many lengths."""
    rng = np.random.default_rng(0)
    c, segment = backend.config, backend.segment
    for batch in (1, 3):
        for adapt in ADAPTS:
            state = random_state(rng, c, boundary_positions(c, batch))
            tokens = rng.integers(0, c.vocab_size, (batch, 2 * segment + 3))
            cuts = tuple(random_cuts(rng, state.position, tokens.shape[1], segment))
            yield Case(f"batch {batch}, adapt {adapt}", tokens, state, np.array([adapt] * batch, np.float32), cuts)
    for length in sorted({n for n in (1, 2, 3, segment // 2, segment - 1, segment) if 0 < n <= segment}):
        state = random_state(rng, c, np.zeros(1, np.int64))
        tokens = rng.integers(0, c.vocab_size, (1, segment))
        cuts = (length, segment - length)[: 1 + (length < segment)]
        yield Case(f"{length} tokens in a call", tokens, state, reference.ADAPT, cuts)


def judged(
    case: Case, backend: OnnxBackend, laws: dict[str, Law], bound: float, tensors: dict[str, float]
) -> Iterator[Check]:
    """A check of one case against each law; fills `tensors` with the largest differences from the law.

    Where rounding alone moves the law itself, in fp32 against fp64, the bound is four times as much.
    """
    outcomes = {name: law(case.tokens, case.state, case.adapt) for name, law in laws.items()}
    rounding = differences(outcomes.pop("fp32"), outcomes["law"])
    bound = max(bound, 4 * max(rounding.values()))
    result = stream(backend, case)
    for name, outcome in outcomes.items():
        found = differences(result, outcome)
        if name == "law":
            tensors |= {tensor: max(value, tensors.get(tensor, 0.0)) for tensor, value in found.items()}
        yield Check(f"{name}: {case.name}", max(found.values()), bound)


def boundary_positions(c: HopeConfig, batch: int) -> Tokens:
    """Positions from which a few tokens reach a boundary of every level, of the memories, and of few."""
    periods = (*c.cms_periods, c.memory_period, c.top_period)
    every = np.lcm.reduce(periods)
    return np.array([every - 2, 3 * c.memory_period - 1, c.top_period + 1], np.int64)[:batch]


def random_state(rng: np.random.Generator, c: HopeConfig, position: Tokens) -> MemoryState:
    """A state in which no tensor is zero, as large as text makes it."""
    zeros = MemoryState.zeros(c, len(position)).tensors
    tensors = {name: (0.1 * rng.standard_normal(t.shape)).astype(np.float32) for name, t in zeros.items()}
    for name, tensor in tensors.items():
        if name.endswith("cms_g"):
            tensors[name] = tensor @ tensor.swapaxes(-1, -2)
    if c.top_rank:
        tensors["top.token"] = rng.integers(0, c.vocab_size, tensors["top.token"].shape).astype(np.float32)
        tensors["top.h"] = rng.standard_normal(tensors["top.h"].shape).astype(np.float32)
    return MemoryState(tensors, position)


def random_cuts(rng: np.random.Generator, position: Tokens, length: int, segment: int) -> Iterator[int]:
    """Random lengths of calls that sum to `length` and cross no multiple of `segment` in any row."""
    while length:
        most = min(length, segment - int((position % segment).max()))
        size = int(rng.integers(1, most + 1))
        yield size
        position, length = position + size, length - size


def stream(backend: OnnxBackend, case: Case) -> Outcome:
    """Logits and last state of a case on onnxruntime."""
    running = backend.open(case.state)
    parts = np.split(case.tokens, np.cumsum(case.cuts)[:-1], 1)
    logits = [running.feed(part, case.adapt).copy() for part in parts]
    return np.concatenate(logits, 1), running.snapshot()


def differences(found: Outcome, wanted: Outcome) -> dict[str, float]:
    """Largest absolute difference of the logits and of each state tensor; inf for NaN."""
    pairs = {"logits": (found[0], wanted[0])}
    pairs |= {name: (value, wanted[1].tensors[name]) for name, value in found[1].tensors.items()}
    return {name: float(np.nan_to_num(np.abs(a - b), nan=np.inf).max()) for name, (a, b) in pairs.items()}


def frozen(backend: OnnxBackend) -> Check:
    """Adapt 0 leaves every fast weight bit for bit as it was, across a boundary; counts those that moved."""
    rng = np.random.default_rng(1)
    state = random_state(rng, backend.config, boundary_positions(backend.config, 1))
    tokens = rng.integers(0, backend.config.vocab_size, (1, backend.segment))
    cuts = tuple(random_cuts(rng, state.position, tokens.shape[1], backend.segment))
    _, last = stream(backend, Case("frozen", tokens, state, np.zeros((1, 2), np.float32), cuts))
    weights = [name for name in state.tensors if not name.endswith(("conv", "top.h", "top.p", "top.token"))]
    moved = sum(not np.array_equal(state.tensors[name], last.tensors[name]) for name in weights)
    return Check("fast weights that move at adapt (0, 0)", moved, 0)


def resumed(backend: OnnxBackend) -> Check:
    """A snapshot in the middle of a chunk continues as the stream it was taken of, bit for bit."""
    rng = np.random.default_rng(2)
    state = random_state(rng, backend.config, np.zeros(1, np.int64))
    tokens = rng.integers(0, backend.config.vocab_size, (1, 2 * backend.segment + 1))
    running = backend.open(state)
    worst = 0.0
    for i in range(tokens.shape[1]):
        saved = running.snapshot()
        logits = running.feed(tokens[:, i : i + 1], reference.ADAPT)
        again = backend.open(saved).feed(tokens[:, i : i + 1], reference.ADAPT)
        worst = max(worst, float(np.abs(logits - again).max()))
    return Check("save and restore anywhere", worst, 0)


def reread(backend: OnnxBackend, bound: float = LONG_BOUND) -> Check:
    """The model's own text, written token by token, read back in whole segments: the same logits."""
    rng = np.random.default_rng(3)
    writing = backend.open(MemoryState.zeros(backend.config))
    tokens, written = [0], []
    for _ in range(LONG):
        written.append(writing.feed(np.array([tokens[-1:]]), reference.ADAPT)[0, 0].copy())
        noise = rng.gumbel(size=len(written[-1]))
        tokens.append(int(np.argmax(written[-1] + noise)))
    whole = np.array([tokens[:-1]])
    cuts = tuple(part.stop - part.start for part in segments(0, LONG, backend.segment))
    read, _ = stream(backend, Case("reread", whole, MemoryState.zeros(backend.config), reference.ADAPT, cuts))
    name = f"{LONG:,} tokens of its own text, read back" + ", activations rounded" * (bound > LONG_BOUND)
    return Check(name, float(np.abs(read[0] - np.stack(written)).max()), bound)
