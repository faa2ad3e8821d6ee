"""What the kernels need to know of the device, and which tensors they cannot serve."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

from kernels.checks import KernelInputError
from kernels.triton.attention_kernel import attention_kernel


@dataclass(frozen=True, slots=True)
class Device:
    """`shared_memory_bytes`: the most one thread block may use. `num_processors`: streaming multiprocessors."""

    num_processors: int
    shared_memory_bytes: int


INTERPRETER = Device(num_processors=8, shared_memory_bytes=227 * 1024)  # a small GPU with the tiles of a large one


def interpreted() -> bool:
    """Whether TRITON_INTERPRET was set when the kernels were defined; setting it later changes nothing."""
    return not isinstance(attention_kernel, triton.JITFunction)


@lru_cache(maxsize=64)
def _device(device: torch.device) -> Device:
    if interpreted():
        return INTERPRETER
    if device.type != "cuda":
        raise KernelInputError(
            f"key_cache: is on {device}, which the Triton kernels cannot reach; use kernels.backend(device), or set "
            "TRITON_INTERPRET=1 before triton is first imported to try them without a GPU"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = triton.runtime.driver.active.utils.get_device_properties(index)
    return Device(properties["multiprocessor_count"], properties["max_shared_mem"])


def check_device(device: torch.device, *dtypes: torch.dtype) -> Device:
    """The device's facts. Raises KernelInputError where the kernels cannot run there with these dtypes."""
    facts = _device(device)
    if interpreted() and torch.bfloat16 in dtypes:
        raise KernelInputError("q: Triton's interpreter computes bfloat16 wrongly; run float32 or float16, or on a GPU")
    return facts


def check_last_stride(name: str, tensor: torch.Tensor) -> None:
    """A head's elements must be neighbours in memory; every other stride may be anything."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise KernelInputError(
            f"{name}: the last dimension's stride is {tensor.stride(-1)}, must be 1; pass {name}.contiguous()"
        )
