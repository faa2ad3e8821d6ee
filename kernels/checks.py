"""What a kernel's arguments must look like; wrong ones are refused before anything is read or written.

Only shapes, dtypes and devices are looked at, never values: reading a value would stall an accelerator. That block
ids and slots lie inside the cache is the caller's promise (the resident batch checks ownership of every id).
"""

from collections.abc import Sequence

import torch

from kernels.shared_blocks import SharedBlocks

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


def check_attention(
    q: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    shared: SharedBlocks | None = None,
) -> None:
    check_caches(key_cache, value_cache)
    check_tensor("q", q, (None, None, key_cache.shape[3]), FLOAT_DTYPES, key_cache.device)
    check_batch(q, key_cache.shape[2], block_tables, query_start, context_lens, window, soft_cap, sinks, shared)


def check_batch(
    q: torch.Tensor,
    num_kv_heads: int,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    window: int | None,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    shared: SharedBlocks | None,
) -> None:
    """What every backend asks for beside the caches; q `[num_tokens, num_heads, ...]` is on their device."""
    device = q.device
    num_heads, num_rows = q.shape[1], context_lens.shape[0]
    if num_heads % num_kv_heads:
        raise KernelInputError(f"q: {num_heads} heads cannot be shared out over {num_kv_heads} key/value heads")
    check_tensor("context_lens", context_lens, (None,), (torch.int32,), device)
    check_tensor("query_start", query_start, (num_rows + 1,), (torch.int32,), device)
    check_tensor("block_tables", block_tables, (num_rows, None), (torch.int32,), device)
    if window is not None and window < 1:
        raise KernelInputError(f"window: is {window}, must be at least 1, or None for the whole context")
    if soft_cap is not None and not soft_cap > 0:
        raise KernelInputError(f"soft_cap: is {soft_cap}, must be above 0, or None for no cap")
    if sinks is not None:
        check_tensor("sinks", sinks, (num_heads,), FLOAT_DTYPES, device)
    if shared is not None:
        check_shared(shared, num_rows, device)


def check_shared(shared: SharedBlocks, num_rows: int, device: torch.device) -> None:
    num_segments = shared.first.shape[0] if shared.first.dim() else 0
    shapes = {"first": (num_segments,), "end": (num_segments,), "row_start": (num_segments + 1,)}
    for name, shape in {**shapes, "rows": (None,), "own_start": (num_rows,)}.items():
        check_tensor(f"shared.{name}", getattr(shared, name), shape, (torch.int32,), device)


def check_copies(caches: Sequence[torch.Tensor], source: torch.Tensor, destination: torch.Tensor) -> None:
    device = caches[0].device if caches else source.device
    check_tensor("source", source, (None,), (torch.int32, torch.int64), device)
    check_tensor("destination", destination, (source.shape[0],), (torch.int32, torch.int64), device)
