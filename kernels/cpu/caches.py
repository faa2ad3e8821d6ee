"""The layout of a CPU's caches: one that vectors of words read without a gather (`csrc/kv_layout.h`).

    keys    [num_blocks, num_kv_heads, key_dim / pack, block_size, pack]
    values  [num_blocks, num_kv_heads, block_size / pack, value_dim, pack]

with one fp32, two bf16 or four int8 in a word (`pack`). Both are views of one memory, in which a block's values follow
its keys: memory gives one long piece faster than two. The keys' dimensions are rounded up to whole words, and memory
of the values to 16 columns. Caches of int8 hold numbers over a scale that each token and head has for its key, and
another for its value; both are fp32, in two words more behind the keys' dimensions. Where all is -1 they are NaN.
"""

import math
from collections.abc import Callable

import torch

from kernels.checks import KernelInputError, check_tensor

PACK = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 4}
_MULTIPLE = 16
_LINE_BYTES, _PAGE_BYTES = 64, 4096
_MOST_INT8_DIM = 512  # of a key: sums of its products fit 32 bits


def is_served(block_size: int, dtype: torch.dtype) -> bool:
    """Whether the native kernels have a layout for such blocks; else they lie as the reference's."""
    return dtype in PACK and block_size % _MULTIPLE == 0


def allocate(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    zero_bytes: Callable[[int], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """A key and a value cache, zero: memory from `zero_bytes`, uint8. Raises KernelInputError."""
    if dtype == torch.int8 and key_dim > _MOST_INT8_DIM:
        raise KernelInputError(f"key_dim: is {key_dim}, must be at most {_MOST_INT8_DIM} for a cache in 8 bits")
    pack = PACK[dtype]
    depth, columns = -(-key_dim // pack) + _num_scales(dtype), -(-value_dim // _MULTIPLE) * _MULTIPLE
    of_head = (depth, block_size, pack), (block_size // pack, columns, pack)
    sizes = [num_kv_heads * math.prod(shape) for shape in of_head]
    blocks = _blocks(num_blocks, sum(sizes), dtype, zero_bytes).split(sizes, 1)
    keys, values = (part.unflatten(1, (num_kv_heads, *shape)) for part, shape in zip(blocks, of_head, strict=True))
    return keys, values[:, :, :, :value_dim]


def _blocks(num_blocks: int, size: int, dtype: torch.dtype, zero_bytes: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """`[num_blocks, size]`; blocks of whole pages are a line apart.

    A core's caches choose a line's place by its address: one head's parts of all blocks would have the same few places,
    and push each other out while they wait there."""
    apart = size + (0 if size * dtype.itemsize % _PAGE_BYTES else _LINE_BYTES // dtype.itemsize)
    return zero_bytes(num_blocks * apart * dtype.itemsize).view(dtype).view(num_blocks, apart)[:, :size]


def _num_scales(dtype: torch.dtype) -> int:
    return 2 if dtype == torch.int8 else 0


def is_native(cache: torch.Tensor) -> bool:
    return cache.dim() == 5


def check_caches(key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Raises KernelInputError."""
    num_blocks, num_kv_heads, _, block_size, pack = key_cache.shape
    if PACK.get(key_cache.dtype) != pack or block_size % _MULTIPLE:
        raise KernelInputError(f"key_cache: {list(key_cache.shape)} of {key_cache.dtype} is no cache of these kernels")
    if key_cache.stride()[2:] != (block_size * pack, pack, 1):
        raise KernelInputError(
            "key_cache: a head's block must be one piece, as allocate_caches makes it; see its stride"
        )
    if value_cache.dim() == 5 and (value_cache.stride()[3:] != (pack, 1) or value_cache.stride(2) % (_MULTIPLE * pack)):
        raise KernelInputError("value_cache: rows must lie as allocate_caches makes them; see the last stride")
    expected = (num_blocks, num_kv_heads, block_size // pack, None, pack)
    check_tensor("value_cache", value_cache, expected, (key_cache.dtype,), key_cache.device)


def check_key_dim(name: str, size: int, key_cache: torch.Tensor) -> None:
    """Raises KernelInputError where heads of `size` are not what the cache holds."""
    _, _, depth, _, pack = key_cache.shape
    depth -= _num_scales(key_cache.dtype)
    if -(-size // pack) != depth:
        raise KernelInputError(f"{name}: heads of {size} do not fit a cache for heads of {depth * pack}")
