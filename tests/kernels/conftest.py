import pytest
import torch

from tests.kernels.pool import BACKENDS, PLAIN

torch.set_num_threads(1)  # the tensors are small; threads would only get in each other's way


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request):
    """Each backend in turn; the Triton one runs in its interpreter."""
    return request.param


@pytest.fixture(params=PLAIN, ids=lambda backend: backend.name)
def plain_backend(request):
    """Each of those whose caches may be any tensors [num_blocks, block_size, num_kv_heads, head_dim]."""
    return request.param
