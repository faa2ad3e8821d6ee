"""`write_kv` and `copy_blocks` of every backend."""

import pytest
import torch

from kernels import KernelInputError
from tests.kernels.pool import Pool


def test_a_slot_beyond_31_bits_of_elements_is_reached(plain_backend):
    # One kv head whose stride puts block 9 past 2**31 elements; only touched pages are backed by memory.
    stride = (1 << 31) // 8
    storage = torch.empty(0, dtype=torch.float16).set_(
        torch.UntypedStorage(2 * (9 * stride + 64)), 0, (10, 2, 1, 4), (stride, 4, 4, 1)
    )
    k = torch.arange(4, dtype=torch.float16).view(1, 1, 4)
    plain_backend.write_kv(k, k, storage, storage, torch.tensor([19]))
    assert torch.equal(storage[9, 1], k[0])


def test_copies_read_their_sources_before_any_destination_is_written(backend):
    cache = torch.arange(4.0).view(4, 1, 1, 1).clone()
    other = cache.clone() * 10
    backend.copy_blocks(
        [cache, other], torch.tensor([1, 2], dtype=torch.int32), torch.tensor([2, 3], dtype=torch.int32)
    )
    assert cache.flatten().tolist() == [0, 1, 1, 2]
    assert other.flatten().tolist() == [0, 10, 10, 20]


def test_narrow_slot_numbers_are_refused(backend):
    pool = Pool([(1, 1)], backend=backend)
    with pytest.raises(KernelInputError, match=r"^slots:"):
        backend.write_kv(
            torch.ones(1, 2, 16),
            torch.ones(1, 2, 16),
            pool.key_cache,
            pool.value_cache,
            torch.tensor([1], dtype=torch.int32),
        )
