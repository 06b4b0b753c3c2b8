"""Hypothesis profiles: `fuzz` is what .ci/run spends its time box on."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("fuzz", max_examples=5_000, deadline=None, derandomize=False, print_blob=True)
