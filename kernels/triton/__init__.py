"""The kernels of a GPU, written in Triton; `kernels.reference` documents what each promises.

Nothing here waits for the device: a launch depends on shapes, dtypes, strides and Python numbers alone, so a step may
be recorded in a CUDA graph and played again with other values in the same tensors.
"""

# Two index operations of torch's, which do not wait for the device either, and its zeros.
from kernels.reference import allocate_caches, copy_blocks
from kernels.triton.attention import paged_attention
from kernels.triton.write import write_kv

__all__ = ["allocate_caches", "copy_blocks", "paged_attention", "write_kv"]
