"""The kernels of a GPU, written in Triton; `kernels.reference` documents what each promises.

Nothing here waits for the device: a launch depends on shapes, dtypes, strides and Python numbers alone, so a step may
be recorded in a CUDA graph and played again with other values in the same tensors.
"""

from kernels.reference import copy_blocks  # two index operations of torch's; they do not wait for the device either
from kernels.triton.attention import paged_attention
from kernels.triton.write import write_kv

__all__ = ["copy_blocks", "paged_attention", "write_kv"]
