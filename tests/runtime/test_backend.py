"""Laws of the cuts that keep a call inside one segment."""

from __future__ import annotations

import doctest

from hypothesis import given
from hypothesis import strategies as st

from fednl_runtime import backend
from fednl_runtime.backend import segments


@given(st.integers(0, 10_000), st.integers(0, 300), st.integers(1, 70))
def test_segments_cover_the_tokens_in_order_and_cross_no_multiple(position, num_tokens, segment):
    cuts = segments(position, num_tokens, segment)
    assert [i for cut in cuts for i in range(cut.start, cut.stop)] == list(range(num_tokens))
    assert all((position + cut.start) // segment == (position + cut.stop - 1) // segment for cut in cuts)


def test_the_documented_example_holds():
    assert doctest.testmod(backend).failed == 0
