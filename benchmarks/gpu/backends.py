"""Which kernels are checked, and which they are checked against."""

import torch

import kernels
from kernels import REFERENCE, Backend

__all__ = ["REFERENCE", "checked_backend", "checked_dtypes", "prepare"]


def checked_backend(device: torch.device) -> Backend:
    """The GPU's kernels; on a CPU the same ones in Triton's interpreter, which is slow and therefore never served."""
    if device.type != "cpu":
        return kernels.backend(device)
    from kernels import triton

    return Backend(
        "triton interpreted", triton.paged_attention, triton.write_kv, triton.copy_blocks, triton.allocate_caches
    )


def checked_dtypes(device: torch.device) -> list[torch.dtype]:
    """The interpreter computes bfloat16 wrongly, and the kernels refuse it there."""
    exact = [torch.float32, torch.float16]
    return exact if device.type == "cpu" else [*exact, torch.bfloat16]


def prepare(device: torch.device) -> None:
    """fp32 products are to be of fp32, in the reference above all."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if device.type == "cpu":
        torch.set_num_threads(1)
