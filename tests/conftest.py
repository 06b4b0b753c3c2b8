"""What all tests share: Hypothesis profiles, and floating point as IEEE 754 has it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

settings.register_profile("fuzz", max_examples=2_000, deadline=None, derandomize=False, print_blob=True)


@pytest.fixture(autouse=True)
def subnormals() -> None:
    """Subnormal numbers count: onnxruntime's first session turns them off for the thread that loads it."""
    torch.set_flush_denormal(False)
