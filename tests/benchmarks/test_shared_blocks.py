"""What the benchmark of shared blocks compares are two ways to the same result, over what it says."""

import pytest
import torch

from benchmarks.shared_blocks import NUM_ROWS, Layers
from kernels import backend


@pytest.mark.parametrize("group", [2, 64])
def test_both_ways_attend_to_the_same_and_what_is_own_is_less(group):
    layers = Layers(backend(torch.device("cpu")), num_caches=1, group=group, shared=3, own_tokens=20)
    ordinary, grouped, own = (work().float() for work in (layers.ordinary, layers.grouped, layers.own))
    torch.testing.assert_close(grouped, ordinary, atol=1e-2, rtol=1e-2)
    assert (own - ordinary).abs().max() > 0.1
    assert len(layers.tables.unique()) == 3 * (NUM_ROWS // group) + 2 * NUM_ROWS
