"""A process in which Triton's kernels run in its interpreter, on the CPU, and what a test may ask of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import torch

from fednl_runtime.config import HopeConfig
from fednl_runtime.reference import Parameters
from fednl_runtime.state import Array, MemoryState, Tensors, Tokens

Answer = Callable[..., Any]


@contextmanager
def interpreter() -> Iterator[Answer]:
    """Call functions of this module in a process of their own: Triton chooses when it is imported."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=poison) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            pool.submit(os.getpid).result()
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


def poison() -> None:
    """Fill new memory with NaN, so that a number which no kernel wrote shows."""
    torch.use_deterministic_algorithms(True)


def to_torch(arrays: Tensors) -> dict[str, torch.Tensor]:
    """Tensors in fp32."""
    return {name: torch.tensor(array, dtype=torch.float32) for name, array in arrays.items()}


def delta(inputs: Tensors, chunk: int) -> tuple[Array, Array]:
    """Reads and last state of `kernels_triton.delta`; its inputs by name."""
    from fednl_runtime import kernels_triton

    y, s = kernels_triton.delta(**to_torch(inputs), chunk=chunk)
    return y.numpy(), s.numpy()


def self_modifying(
    u: Array, layer: Parameters, state: Tensors, adapt: Array, closing: Array, c: HopeConfig
) -> tuple[Array, Tensors]:
    """Reads and last state of `kernels_triton.self_modifying` for u `[4, B, H, n, h]`."""
    from fednl_runtime import kernels_triton

    inputs = torch.tensor(u, dtype=torch.float32).unbind(0)
    scales, rows = torch.tensor(adapt, dtype=torch.float32), torch.tensor(closing)
    y, new = kernels_triton.self_modifying(inputs, to_torch(dict(layer)), to_torch(state), scales, rows, c)
    return y.numpy(), {name: tensor.numpy() for name, tensor in new.items()}


def stream(
    params: Parameters, c: HopeConfig, state: MemoryState, calls: list[Tokens], adapt: Array
) -> tuple[Array, MemoryState]:
    """Logits `[B, T, V]` and last state of a stream whose memories run as kernels."""
    from fednl_runtime.torch_backend import TorchBackend

    opened = TorchBackend(c, params, "", kernels=True).open(state)
    return np.concatenate([opened.feed(tokens, adapt) for tokens in calls], 1), opened.snapshot()
