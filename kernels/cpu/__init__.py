"""The native kernels of a CPU, in C++ (`csrc/`); `kernels.reference` documents what each promises.

They serve fp32, bf16 and int8 caches whose blocks are multiples of 16 tokens, in a layout of their own (`caches`).
For other types and blocks `allocate_caches` gives the reference's layout, and the reference does the work.
"""

from kernels.cpu.levels import supported
from kernels.cpu.native import NativeKernels

__all__ = ["NativeKernels", "supported"]
