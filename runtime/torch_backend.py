"""The model on torch: eager operators on a CPU, Triton kernels for the memories on a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fednl_runtime import hope_step
from fednl_runtime.config import HopeConfig
from fednl_runtime.errors import ConfigError, ModelFileError, StateError
from fednl_runtime.hope import Hope
from fednl_runtime.recurrence import TensorDict
from fednl_runtime.rules import RANGES
from fednl_runtime.state import Array, MemoryState, Tokens, check_state, state_shapes

LONGEST = 64
"""Most tokens of one call: those that a chunk of the memories' kernels takes."""


def longest_segment(config: HopeConfig) -> int:
    """The largest number of tokens, at most LONGEST, whose multiples are those that no call may cross."""
    return max(n for n in range(1, LONGEST + 1) if config.segment % n == 0)


def rule_names(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """The parameter behind each rule `rule.*`."""
    names = [name for name in parameters if name.startswith(("layers.", "top.")) and name.rpartition(".")[2] in RANGES]
    return {f"rule.{name.removeprefix('layers.')}": name for name in names}


class TorchBackend:
    """A model's weights on a device: immutable, shared by all streams."""

    def __init__(
        self,
        config: HopeConfig,
        params: Mapping[str, Array],
        fingerprint: str,
        device: str = "cpu",
        kernels: bool | None = None,
    ) -> None:
        """Put the parameters of `reference.step` on a torch device, in fp32.

        `kernels` chooses Triton kernels for the memories; by default a GPU has them and a CPU does not.

        Raises:
            ConfigError: torch finds no such device here.
            ModelFileError: the parameters are not those of the configuration.
        """
        try:
            tensors = {n: torch.tensor(np.asarray(p), dtype=torch.float32, device=device) for n, p in params.items()}
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(f"torch cannot use {device!r} here ({error}). Choose another device.") from error
        kernels = torch.device(device).type == "cuda" if kernels is None else kernels
        self._build(config, tensors, fingerprint, kernels)

    def _build(self, config: HopeConfig, tensors: TensorDict, fingerprint: str, kernels: bool) -> None:
        self.config, self.fingerprint, self.segment = config, fingerprint, longest_segment(config)
        self._tensors, self._kernels = tensors, kernels
        self.model = load_model(config, tensors, self.segment)
        if kernels:
            from fednl_runtime import kernels_triton

            self.model.delta, self.model.self_modifying = kernels_triton.delta, kernels_triton.self_modifying

    def with_rules(self, rules: Mapping[str, Array]) -> TorchBackend:
        """The same weights with some rules replaced, by name `rule.*`; streams already open keep theirs.

        Raises:
            ModelFileError: a name or shape is not one of this model's rules, or a number is not finite.
        """
        names, replaced = rule_names(self._tensors), dict(self._tensors)
        for name, value in rules.items():
            if name not in names or replaced[names[name]].shape != np.shape(value):
                raise ModelFileError(
                    f"{name} of shape {np.shape(value)} is no rule of this model. Use rules made for it."
                )
            if not np.isfinite(value).all():
                raise ModelFileError(f"{name} holds numbers that are not finite. Discard this set of rules.")
            replaced[names[name]] = replaced[names[name]].new_tensor(np.asarray(value, np.float32))
        other = TorchBackend.__new__(TorchBackend)
        other._build(self.config, replaced, self.fingerprint, self._kernels)
        return other

    def open(self, state: MemoryState) -> TorchStream:
        """A stream that continues from `state`; the state itself is left alone. Raises StateError."""
        check_state(state.tensors, state_shapes(self.config))
        if any(len(t) != len(state.position) for t in state.tensors.values()):
            raise StateError("The rows of the state's tensors and positions differ in number.")
        return TorchStream(self, state)

    @torch.inference_mode()
    def run(self, tokens: Tensor, state: TensorDict, adapt: Tensor) -> tuple[Tensor, TensorDict]:
        """Logits `[B, T, V]` and the next state; kernels update the memories of the given state in place."""
        if tokens.shape[1] == 1 and not self._kernels and tokens.device.type == "cpu":
            logits, state = hope_step.step(self.model, tokens[:, 0], state, adapt)
            return logits[:, None], state
        with torch.cuda.device_of(tokens):  # where Triton launches; a CPU is none of its devices
            return self.model(tokens, state, adapt)


def load_model(config: HopeConfig, tensors: TensorDict, chunk: int) -> Hope:
    """A model that shares the given tensors. Raises ModelFileError where names or shapes are not its own."""
    with torch.device("meta"):
        model = Hope(config, chunk=chunk)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    given = {name: tensor.shape for name, tensor in tensors.items()}
    if differing := sorted(name for name, _ in shapes.items() ^ given.items()):
        names = ", ".join(dict.fromkeys(differing[:6]))
        raise ModelFileError(f"The weights and the configuration differ in {names}. Use those saved with it.")
    model.load_state_dict(tensors, assign=True)
    return model.requires_grad_(False)


class TorchStream:
    """Sessions in rows of buffers on the backend's device; one owner, one thread."""

    def __init__(self, backend: TorchBackend, state: MemoryState) -> None:
        self._backend, self._device = backend, backend.model.embedding.device
        self._state = {n: torch.tensor(t, dtype=torch.float32, device=self._device) for n, t in state.tensors.items()}
        self._position = torch.tensor(state.position)  # on the CPU: the calls are cut by it

    def feed(self, tokens: Tokens, adapt: Array, first: int = 0) -> Array:
        """Read tokens `[B, T]` in the rows from `first` on, with adapt `[B, 2]`; return logits `[B, T, V]`."""
        rows, length = slice(first, first + len(tokens)), tokens.shape[1]
        assert 0 < length <= self._backend.segment - int((self._position[rows] % self._backend.segment).max())
        ids = torch.tensor(tokens, device=self._device)
        scales = torch.tensor(np.broadcast_to(adapt, (len(tokens), 2)), dtype=torch.float32, device=self._device)
        state = {name: tensor[rows] for name, tensor in self._state.items()}
        logits, new = self._backend.run(ids, state | {"position": self._position[rows]}, scales)
        for name, tensor in state.items():
            if new[name].data_ptr() != tensor.data_ptr():
                tensor.copy_(new[name])
        self._position[rows] += length
        return logits.cpu().numpy()

    def snapshot(self, row: int | None = None) -> MemoryState:
        """An owning copy of the state after the last `feed`: of one row, or of all."""
        rows = slice(None) if row is None else slice(row, row + 1)
        tensors = {name: tensor[rows].cpu().numpy().copy() for name, tensor in self._state.items()}
        return MemoryState(tensors, self._position[rows].numpy().copy())

    def put(self, row: int, state: MemoryState) -> None:
        """Replace a row by a state of one. Raises StateError."""
        check_state(state.tensors, state_shapes(self._backend.config))
        for name, tensor in self._state.items():
            tensor[row] = torch.from_numpy(state.tensors[name][0])
        self._position[row] = int(state.position[0])

    def swap(self, row: int, other: int) -> None:
        """Exchange two rows."""
        pair, turned = [row, other], [other, row]
        for tensor in (*self._state.values(), self._position):
            tensor[pair] = tensor[turned]
