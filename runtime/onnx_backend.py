"""The model on onnxruntime: a file as a backend, its sessions' buffers as streams."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped]

from fednl_runtime.errors import ModelFileError, StateError
from fednl_runtime.model_file import ModelFile, Tensor, parse_model
from fednl_runtime.state import Array, MemoryState, Tensors, Tokens, check_state

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def default_threads() -> int:
    """Cores this process may use: its CPU affinity, and its container's quota rounded down."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CGROUP_QUOTA.read_text().split()
        cores = min(cores, int(quota) // int(period))
    except (OSError, ValueError):  # no cgroup v2 here, or "max": no quota
        pass
    return max(1, cores)


def session_options(threads: int | None) -> ort.SessionOptions:
    """Options of a session that shares its machine: no spinning, no subnormals, all fusions."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or default_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    return options


def load(path: str | Path, threads: int | None = None) -> OnnxBackend:
    """Load a model file; `threads` defaults to the cores this process may use.

    Raises:
        ModelFileError: missing, damaged, not one of our models, or made for a newer runtime.
    """
    path = Path(path)
    if not path.is_file():
        raise ModelFileError(f"There is no model file {path}. Check the path, or make one with `fednl-runtime export`.")
    session = open_session(path, session_options(threads))
    try:
        return OnnxBackend(session)
    except ModelFileError as error:
        raise ModelFileError(f"{path}: {error}") from error


def open_session(path: Path, options: ort.SessionOptions) -> ort.InferenceSession:
    """A session on a graph's file. Raises ModelFileError, whose sentence says why it cannot be loaded."""
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise ModelFileError(f"{path}: {_reason(str(error))}") from error


REASONS = (
    (("is not a registered function/op", "No Op registered", "Could not find an implementation"),
     "The model uses an operator that this onnxruntime lacks. Upgrade it, or export with --portable."),
    (("Unsupported model IR version", "opset", "Unrecognized attribute"),
     "The model was made for a newer onnxruntime. Upgrade with `pip install -U onnxruntime`."),
    (("External data path",),
     "Its weights, a file named .data, are not next to it. Keep both in one folder, under the names they were given."),
    (("Protobuf parsing failed", "ModelProto does not have a graph"),
     "This is not an ONNX file, or it is cut short. Download or export it again."),
)  # fmt: skip
"""What onnxruntime says of a file that it cannot load, and what to do about it."""


def _reason(message: str) -> str:
    """onnxruntime's message in plain words."""
    known = (advice for parts, advice in REASONS if any(part in message for part in parts))
    return next(known, f"onnxruntime cannot load it ({message[:200]}). Download or export it again.")


def _tensors(args: list[ort.NodeArg]) -> dict[str, Tensor]:
    return {arg.name: (arg.type, tuple(arg.shape)) for arg in args}


class OnnxBackend:
    """A loaded model: immutable, shared by all streams."""

    def __init__(self, session: ort.InferenceSession, rules: Tensors | None = None) -> None:
        """Wrap a session; `rules` replace the stored ones of the same name. Raises ModelFileError."""
        inputs = _tensors([*session.get_inputs(), *session.get_overridable_initializers()])
        self.model: ModelFile = parse_model(
            session.get_modelmeta().custom_metadata_map, inputs, _tensors(session.get_outputs())
        )
        self.config = self.model.config
        self.segment = self.model.segment
        self.tokenizer_json = self.model.tokenizer_json
        self.fingerprint = self.model.fingerprint
        self._session = session
        self._rules = rules or {}

    def with_rules(self, rules: Mapping[str, Array]) -> OnnxBackend:
        """The same loaded model with some rules replaced, by name `rule.*`; streams already open keep theirs.

        Raises:
            ModelFileError: a name or shape is not one of this model's rules, or a number is not finite.
        """
        for name, value in rules.items():
            if self.model.rules.get(name) != np.shape(value):
                wanted = self.model.rules.get(name, "no such rule")
                raise ModelFileError(
                    f"{name} is {np.shape(value)}, but this model has {wanted}. Use rules made for it."
                )
            if not np.isfinite(value).all():
                raise ModelFileError(f"{name} holds numbers that are not finite. Discard this set of rules.")
        own = {name: np.array(value, np.float32, order="C") for name, value in rules.items()}
        return OnnxBackend(self._session, {**self._rules, **own})

    def open(self, state: MemoryState) -> OnnxStream:
        """A stream that continues from `state`; the state itself is left alone. Raises StateError."""
        check_state(state.tensors, self.model.state)
        if any(len(t) != len(state.position) for t in state.tensors.values()):
            raise StateError("The rows of the state's tensors and positions differ in number.")
        return OnnxStream(self._session, self.model, state, self._rules)


class OnnxStream:
    """Sessions in rows: two sets of state buffers, written in turn; one owner, one thread.

    Each row is in one set at a time. Tensors that a call may write where it reads them are the same array in both.
    """

    def __init__(self, session: ort.InferenceSession, model: ModelFile, state: MemoryState, rules: Tensors) -> None:
        self._session, self._model, self._rules = session, model, rules
        rows = len(state.position)
        first = {n: np.array(t, np.float32, order="C") for n, t in state.tensors.items()}
        second = {n: t if n in model.in_place else np.empty_like(t) for n, t in first.items()}
        self._states = (first, second)
        self._sets = np.zeros(rows, np.int64)
        self._position = np.array(state.position, np.int64)
        self._adapt = np.ones((rows, 2), np.float32)
        self._tokens = np.zeros(rows * model.segment, np.int64)
        self._logits = np.zeros(rows * model.segment * model.config.vocab_size, np.float32)
        self._views: dict[tuple[int, int], tuple[Tokens, Array]] = {}
        self._bindings: dict[tuple[int, int, int, int], ort.IOBinding] = {}

    def feed(self, tokens: Tokens, adapt: Array, first: int = 0) -> Array:
        """Read tokens `[B, T]` in the rows from `first` on; return logits `[B, T, V]`, a view until the next call."""
        rows, (count, length) = slice(first, first + len(tokens)), tokens.shape
        assert 0 < length <= self._model.segment - int((self._position[rows] % self._model.segment).max())
        ids, logits = self._buffers(count, length)
        np.copyto(ids, tokens)
        np.copyto(self._adapt[rows], adapt)
        now = int(self._sets[first])
        for row in np.flatnonzero(self._sets[rows] != now):
            self._bring(first + int(row), now)
        self._session.run_with_iobinding(self._binding(first, count, length, now))
        self._sets[rows] = 1 - now
        self._position[rows] += length
        return logits

    def snapshot(self, row: int | None = None) -> MemoryState:
        """An owning copy of the state after the last `feed`: of one row, or of all."""
        if row is not None:
            return MemoryState(self._states[self._sets[row]], self._position).row(row)
        return MemoryState.stack([self.snapshot(row) for row in range(len(self._position))])

    def put(self, row: int, state: MemoryState) -> None:
        """Replace a row by a state of one. Raises StateError."""
        check_state(state.tensors, self._model.state)
        for name, tensor in self._states[0].items():
            tensor[row] = state.tensors[name][0]
        self._sets[row], self._position[row] = 0, state.position[0]

    def swap(self, row: int, other: int) -> None:
        """Exchange two rows."""
        pair, turned = [row, other], [other, row]
        for tensors in self._states:
            for name, tensor in tensors.items():
                if tensors is self._states[0] or name not in self._model.in_place:
                    tensor[pair] = tensor[turned]
        self._sets[pair], self._position[pair] = self._sets[turned], self._position[turned]

    def _bring(self, row: int, to: int) -> None:
        """Copy a row from the other set of buffers."""
        for name, tensor in self._states[to].items():
            if name not in self._model.in_place:
                tensor[row] = self._states[1 - to][name][row]
        self._sets[row] = to

    def _buffers(self, count: int, length: int) -> tuple[Tokens, Array]:
        """The token and logits buffers of a call of `length` tokens in `count` rows."""
        if (count, length) not in self._views:
            vocabulary, number = self._model.config.vocab_size, count * length
            ids = self._tokens[:number].reshape(count, length)
            logits = self._logits[: number * vocabulary].reshape(count, length, vocabulary)
            self._views[count, length] = ids, logits
        return self._views[count, length]

    def _binding(self, first: int, count: int, length: int, now: int) -> ort.IOBinding:
        """The inputs and outputs of a call on rows that are in the set `now`."""
        key = (first, count, length, now)
        if key not in self._bindings:
            rows = slice(first, first + count)
            ids, logits = self._buffers(count, length)
            inputs: Mapping[str, Array | Tokens] = {
                "input_ids": ids,
                "position": self._position[rows],
                "adapt": self._adapt[rows],
                **{f"past.{n}": t[rows] for n, t in self._states[now].items()},
                **self._rules,
            }
            outputs = {"logits": logits, **{f"present.{n}": t[rows] for n, t in self._states[1 - now].items()}}
            self._bindings[key] = bound(self._session, inputs, outputs)
        return self._bindings[key]


def bound(
    session: ort.InferenceSession, inputs: Mapping[str, Array | Tokens], outputs: Mapping[str, Array]
) -> ort.IOBinding:
    """A binding to buffers in place, which must outlive it: no call allocates or copies them."""
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    for name, array in outputs.items():
        binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    return binding
