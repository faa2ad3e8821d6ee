"""What a kernel's arguments must look like; wrong ones are refused before anything is read or written.

Only shapes, dtypes and devices are looked at, never values: reading a value would stall an accelerator. That block
ids and slots lie inside the cache is the caller's promise (the resident batch checks ownership of every id).
"""

from collections.abc import Sequence

import torch

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class KernelInputError(ValueError):
    """An argument has a shape, dtype or device that no kernel can work with."""


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """`shape` has None where any size will do."""
    fits = len(tensor.shape) == len(shape) and all(
        want is None or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise KernelInputError(f"{name}: shape is {list(tensor.shape)}, must be [{wanted}]")
    if tensor.dtype not in dtypes:
        raise KernelInputError(f"{name}: dtype is {tensor.dtype}, must be one of {', '.join(map(str, dtypes))}")
    if tensor.device != device:
        raise KernelInputError(f"{name}: is on {tensor.device}, must be on {device} as the cache is")


def check_caches(key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    check_tensor("key_cache", key_cache, (None, None, None, None), FLOAT_DTYPES, key_cache.device)
    num_blocks, block_size, num_kv_heads, _ = key_cache.shape
    expected = (num_blocks, block_size, num_kv_heads, None)
    check_tensor("value_cache", value_cache, expected, (key_cache.dtype,), key_cache.device)


def check_write(
    k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    check_caches(key_cache, value_cache)
    num_tokens, device = k.shape[0], key_cache.device
    check_tensor("k", k, (None, *key_cache.shape[2:]), FLOAT_DTYPES, device)
    check_tensor("v", v, (num_tokens, *value_cache.shape[2:]), FLOAT_DTYPES, device)
    # A slot number in 32 bits overflows when it is multiplied by the size of a slot.
    check_tensor("slots", slots, (num_tokens,), (torch.int64,), device)


def check_copies(caches: Sequence[torch.Tensor], source: torch.Tensor, destination: torch.Tensor) -> None:
    device = caches[0].device if caches else source.device
    check_tensor("source", source, (None,), (torch.int32, torch.int64), device)
    check_tensor("destination", destination, (source.shape[0],), (torch.int32, torch.int64), device)
