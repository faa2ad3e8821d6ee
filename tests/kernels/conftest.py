import pytest
import torch

from tests.kernels.pool import BACKENDS

torch.set_num_threads(1)  # the tensors are small; threads would only get in each other's way


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request):
    """Each backend in turn; the Triton one runs in its interpreter."""
    return request.param
