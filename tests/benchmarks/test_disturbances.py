"""The figures of those who are disturbed come from ten streams, beside others who do what they are meant to."""

import math

import pytest

from benchmarks.disturbances import BOUNDS, TEXTS, measure


@pytest.mark.slow
async def test_all_figures_that_have_bounds_are_measured_and_all_calls_end_as_they_should() -> None:
    found = await measure(alone_s=2.0, beside_s=3.0)
    assert BOUNDS.keys() <= found.keys()
    assert found["not_as_expected"] == 0
    assert found["long_texts"].keys() == TEXTS.keys()
    for name in ("rate_lost", "health_ms", "refused_ms"):
        assert 0 < found[name] < math.inf
