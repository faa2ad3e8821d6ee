"""Blocks whose bytes lie beyond 2^31 and 2^32, in memory that is really there."""

from dataclasses import replace

import torch

from benchmarks.gpu.backends import REFERENCE
from benchmarks.gpu.batches import Heads, make_batch, random_kv
from benchmarks.gpu.compare import distance, same_bits
from kernels import Backend

MARKS = (1 << 31, 1 << 32, 1 << 33, 1 << 34)  # bytes; 2^33 is the 2^32nd element of two bytes
FREE_SHARE = 0.7
MOST_BYTES_ON_CPU = (1 << 32) + (1 << 24)  # only pages that are touched take memory there


def far_blocks(backend: Backend, device: torch.device) -> tuple[dict[str, int], list[str]]:
    """One row with blocks on both sides of each mark that the memory holds; keys and values share one buffer.

    Returns figures, and what is wrong.
    """
    heads, dtype, block_size = Heads(4, 2, 128), torch.float16, 16
    block_bytes = 2 * block_size * heads.kv * heads.dim * dtype.itemsize
    room = _most_bytes(device)
    marks = [mark for mark in MARKS if mark + 4 * block_bytes < room]
    if not marks:
        return {"highest_byte": 0}, []
    ids = torch.tensor([mark // block_bytes + shift for mark in marks for shift in (-1, 0, 1)])
    both = torch.empty(int(ids[-1]) + 1, 2, block_size, heads.kv, heads.dim, dtype=dtype, device=device)
    rows = [(2, block_size * len(ids) - 3)]
    near = make_batch(rows, heads, block_size=block_size, dtype=dtype, device=device, shuffled=False)
    positions = torch.arange(rows[0][1])
    far = replace(
        near,
        key_cache=both[:, 0],
        value_cache=both[:, 1],
        block_tables=ids.to(device, torch.int32)[None],
        slots=(ids[positions // block_size] * block_size + positions % block_size).to(device),
    )
    k, v = random_kv(near, seed=1)
    REFERENCE.write_kv(k, v, near.key_cache, near.value_cache, near.slots)
    backend.write_kv(k, v, far.key_cache, far.value_cache, far.slots)
    errors = []
    for name, written in (("keys", k), ("values", v)):
        cache = far.key_cache if name == "keys" else far.value_cache
        if not same_bits(cache[ids.to(device)].flatten(0, 1)[: len(written)], written):
            errors.append(f"write_kv puts {name} of far blocks elsewhere")
    found = distance(far.attend(backend), near.attend(REFERENCE))
    if not found.within(dtype):
        errors.append(f"paged_attention over far blocks is off by {found.relative:.3g}")
    return {"highest_byte": both.numel() * dtype.itemsize}, errors


def _most_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return MOST_BYTES_ON_CPU
    return int(FREE_SHARE * torch.cuda.mem_get_info(device)[0])
