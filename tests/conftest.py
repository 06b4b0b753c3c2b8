"""What all tests share: Hypothesis profiles, and floating point as IEEE 754 has it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

# The laws of property tests are not about time: a machine that is busy with something else must not break them.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
settings.register_profile(
    "fuzz", settings.get_profile("patient"), max_examples=2_000, derandomize=False, print_blob=True
)


@pytest.fixture(autouse=True)
def subnormals() -> None:
    """Subnormal numbers count: onnxruntime's first session turns them off for the thread that loads it."""
    torch.set_flush_denormal(False)


@pytest.fixture(autouse=True, scope="session")
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers that tests start keep their sessions apart from those of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
