"""How fast a model reads, writes and learns here, beside what the memory of this machine allows."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fednl_runtime.backend import FREEZE, LEARN, Backend, Stream
from fednl_runtime.model_file import ModelFile
from fednl_runtime.slots import LONGEST
from fednl_runtime.state import MemoryState
from fednl_runtime.stopwatch import READ_BYTES, Timing, interleaved, reads, rss_anon, timed

if TYPE_CHECKING:
    from fednl_runtime.onnx_backend import OnnxBackend

T = TypeVar("T")
BATCHES = (1, 2, 4, 8, 16)
STILL = (0.0, 0.0)
"""Adapt scales at which nothing learns."""
ARMS = {"all_learn": LEARN, "slow_frozen": FREEZE, "all_frozen": STILL}
SAMPLES = 100
"""Pieces of a long session whose time and memory are noted."""
WARM_UP = 0.1
"""Share of a long session after which time and memory are compared."""


@dataclasses.dataclass(frozen=True)
class Rate:
    """Tokens a second, with the seconds of one call of the model they follow from."""

    tokens_per_second: float
    call: Timing
    bytes_per_second: float = 0.0
    """Bytes of weights and memory that the calls had to read and write."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """Rates of reading tokens, and the bytes a second at which one thread and all of them read plain memory.

    The bandwidth is that of the fastest round, so that a share of it is never flattered.
    """

    rates: dict[str, Rate]
    bandwidth_one: float
    bandwidth_all: float


@dataclasses.dataclass(frozen=True)
class Node:
    """One operator: how many nodes a token runs, and their microseconds a token."""

    operator: str
    nodes: float
    microseconds: float


@dataclasses.dataclass(frozen=True)
class Soak:
    """A long session: seconds a token in the tenth after the warm-up and in the last one, and anonymous memory.

    `rss_anon` is that memory along the way in bytes, `drift_percent` its change between those tenths.
    """

    tokens: int
    seconds: float
    first_tenth: Timing
    last_tenth: Timing
    rss_anon: tuple[int, ...]
    drift_percent: float | None


def weight_bytes(model: ModelFile, file_bytes: int) -> int:
    """Bytes of weights that one call of a model of `file_bytes` reads at least.

    Half-precision weights are widened when they are loaded, so that four bytes a parameter are read; the matrices
    of a quantised file are read as they lie there.
    """
    if "quantization" not in model.metadata:
        return 4 * model.parameters
    return file_bytes - len(model.tokenizer_json.encode())


def call_bytes(model: ModelFile, file_bytes: int, rows: int) -> int:
    """Bytes that a call of one token in each of `rows` rows must move: weights, and each memory in and out."""
    return weight_bytes(model, file_bytes) + 2 * rows * model.state_bytes


def spread_out(backend: Backend, rows: int) -> Stream:
    """Fresh sessions at different positions, as they are in life: boundaries come one row at a time."""
    state = MemoryState.zeros(backend.config, rows)
    state.position[:] = np.arange(rows) * (backend.segment // min(rows, backend.segment) or 1)
    return backend.open(state)


def one_by_one(stream: Stream, rows: int, steps: int, adapt: tuple[float, float] = LEARN) -> Callable[[], None]:
    """A function that reads `steps` tokens in every row, one a call."""
    scales, tokens = np.array([adapt] * rows, np.float32), np.arange(rows)[:, None]

    def work() -> None:
        for _ in range(steps):
            stream.feed(tokens, scales)

    return work


def in_segments(backend: Backend, stream: Stream, count: int) -> Callable[[], None]:
    """A function that reads a prompt of so many segments, in the pieces in which the engine reads one alone."""
    scales = np.array([LEARN], np.float32)
    tokens = np.arange(backend.segment)[None] % backend.config.vocab_size
    pieces = [tokens[:, start : start + LONGEST] for start in range(0, backend.segment, LONGEST)]

    def work() -> None:
        for _ in range(count):
            for piece in pieces:
                stream.feed(piece, scales)

    return work


def reading(backend: OnnxBackend, file_bytes: int, threads: int, steps: int, rounds: int) -> Reading:
    """Rates of prefill and of decode in batches of `steps` calls, and the bandwidth, in the same rounds."""
    count, prompt = max(1, steps // backend.segment), backend.open(MemoryState.zeros(backend.config))
    works = {f"decode_{rows}": one_by_one(spread_out(backend, rows), rows, steps) for rows in BATCHES}
    with reads(threads) as memory:
        timings = interleaved({**memory, "prefill": in_segments(backend, prompt, count), **works}, rounds)
    calls = count * -(-backend.segment // LONGEST)
    rates = {"prefill": rate_of(timings["prefill"], count * backend.segment, calls)}
    for rows in BATCHES:
        traffic = call_bytes(backend.model, file_bytes, rows)
        rates[f"decode_{rows}"] = rate_of(timings[f"decode_{rows}"], rows * steps, steps, traffic)
    return Reading(rates, *(READ_BYTES / timings[name].low for name in memory))


def rate_of(timing: Timing, tokens: int, calls: int, traffic: int = 0) -> Rate:
    """The rate of work that read `tokens` in `calls` calls, each of which moves `traffic` bytes."""
    return Rate(tokens / timing.median, timing.each(calls), calls * traffic / timing.median)


def adaptation(backend: Backend, steps: int, rounds: int) -> dict[str, Timing]:
    """A step of decode with everything learning, with the slow levels frozen, and with nothing learning.

    One graph computes all three, so this is what a frozen session saves, not what learning costs: the writes
    are made in each, with scales of 0.
    """
    works = {name: one_by_one(spread_out(backend, 1), 1, steps, scales) for name, scales in ARMS.items()}
    return {name: timing.each(steps) for name, timing in interleaved(works, rounds).items()}


def nodes(path: Path, threads: int, steps: int) -> list[Node]:
    """Where a token's time goes, by operator, most first. Raises ModelFileError."""
    from fednl_runtime.onnx_backend import OnnxBackend, open_session, session_options

    options = session_options(threads)
    with tempfile.TemporaryDirectory() as folder:
        options.enable_profiling, options.profile_file_prefix = True, str(Path(folder) / "profile")
        session = open_session(path, options)
        backend = OnnxBackend(session)
        one_by_one(backend.open(MemoryState.zeros(backend.config)), 1, steps)()
        events = json.loads(Path(session.end_profiling()).read_text())
    return by_operator(events, steps)


def by_operator(events: Iterable[dict[str, Any]], steps: int) -> list[Node]:
    """Nodes and microseconds of each operator in onnxruntime's events of so many steps.

    A branch runs within the time of its `If`, to which only what is left of it is counted.
    """
    count, spent, until = Counter[str](), Counter[str](), 0
    kernels = [event for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
    for event in sorted(kernels, key=lambda event: int(event["ts"])):
        operator = event["args"]["op_name"]
        count[operator] += 1
        spent[operator] += event["dur"]
        if event["ts"] < until:
            spent["If"] -= event["dur"]
        if operator == "If":
            until = event["ts"] + event["dur"]
    return [Node(name, count[name] / steps, total / steps) for name, total in spent.most_common()]


def soak(backend: Backend, tokens: int, report: Callable[[int], None]) -> Soak:
    """Read so many tokens into one session; `report` gets the tokens of each piece.

    Each piece is half a prompt, read in segments, and half an answer, read token by token.
    """
    size = max(1, tokens // backend.segment // SAMPLES // 2)
    half, stream = size * backend.segment, backend.open(MemoryState.zeros(backend.config))
    prompt, answer = in_segments(backend, stream, size), one_by_one(stream, 1, half)
    times, memory = list[tuple[float, float]](), list[int]()
    for _ in range(max(1, tokens // (2 * half))):
        times.append(timed(lambda: (prompt(), answer())))
        memory += [size_now] if (size_now := rss_anon()) is not None else []
        report(2 * half)
    first, last = (Timing.of(*map(list, zip(*part, strict=True))).each(2 * half) for part in tenths(times))
    return Soak(
        tokens=len(times) * 2 * half,
        seconds=sum(wall for wall, _ in times),
        first_tenth=first,
        last_tenth=last,
        rss_anon=tuple(memory[:: max(1, len(memory) // 10)]),
        drift_percent=drift(memory) if memory else None,
    )


def drift(memory: list[int]) -> float:
    """Change in percent from the tenth after the warm-up to the last tenth, of medians."""
    before, after = (float(np.median(part)) for part in tenths(memory))
    return 100 * (after / before - 1)


def tenths(samples: list[T]) -> tuple[list[T], list[T]]:
    """The tenth after the warm-up, and the last one."""
    tenth, start = max(1, len(samples) // 10), int(WARM_UP * len(samples))
    return samples[start : start + tenth], samples[-tenth:]
