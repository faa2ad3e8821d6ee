"""Beside attention over contiguous memory: torch's own, and FlashAttention where it is installed.

All rows have the same length here, for that is what the peers take. Each gets the layout that it likes best.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.backends import checked_backend, prepare
from benchmarks.gpu.bandwidth import REPEATS, TINY_REPEATS
from benchmarks.gpu.batches import Batch, Heads, make_batch
from benchmarks.gpu.compare import distance
from benchmarks.gpu.sections import Machine, Report
from benchmarks.gpu.timing import num_copies, ratio, release_memory, significant, take_turns, typical_us

FLASH = "flash_attn"
FLASH_BLOCK_SIZE = 256  # the paged form of FlashAttention takes multiples of it
Attention = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """`num_rows` rows of `context` tokens each, of which the last `queries` ask."""

    heads: Heads
    num_rows: int
    queries: int
    context: int


SHAPES = {
    "decode, 64 rows of 2048": Shape(Heads(32, 8, 128), 64, 1, 2048),
    "decode, 8 rows of 8192": Shape(Heads(32, 8, 128), 8, 1, 8192),
    "decode, 1 row of 32768": Shape(Heads(32, 8, 128), 1, 1, 32_768),
    "prefill, 4 rows of 2048": Shape(Heads(32, 8, 128), 4, 2048, 2048),
    "prefill, 1 row of 8192": Shape(Heads(32, 8, 128), 1, 8192, 8192),
}
TINY_SHAPES = {
    "decode, 2 rows of 32": Shape(Heads(4, 2, 64), 2, 1, 32),
    "prefill, 1 row of 24": Shape(Heads(4, 2, 64), 1, 24, 24),
}


def measure(machine: Machine, report: Report) -> None:
    device = torch.device(machine.device)
    prepare(device)
    report.add(flash_attention=importlib.util.find_spec(FLASH) is not None)
    for name, shape in (TINY_SHAPES if machine.tiny else SHAPES).items():
        report.attempt(name, partial(against_peers, shape, device))
        release_memory(device)


def against_peers(shape: Shape, device: torch.device) -> dict[str, float]:
    """Times, and each peer's by ours (above 1: we are faster). Raises ValueError, before anything is timed, for results
    that differ."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    sets = [_works(shape, dtype, device, 0)]
    kv_bytes = 2 * shape.num_rows * shape.context * shape.heads.kv * shape.heads.dim * dtype.itemsize
    sets += [_works(shape, dtype, device, seed) for seed in range(1, num_copies(kv_bytes, device))]
    ours = sets[0]["paged"]()
    for name, work in sets[0].items():
        found = distance(work().reshape(ours.shape), ours)
        if not found.within(dtype):
            raise ValueError(f"{name} and ours differ by {found.relative:.3g} of a vector's length")
    repeats = REPEATS if device.type == "cuda" else TINY_REPEATS
    times = take_turns({name: [works[name] for works in sets] for name in sets[0]}, repeats, device)
    figures = {f"{name}_us": typical_us(seconds) for name, seconds in times.items()}
    figures |= {f"{name}_by_paged": ratio(times, name, "paged") for name in times if name != "paged"}
    if shape.queries > 1:
        figures["paged_tflop_s"] = significant(flop(shape) / 1e6 / figures["paged_us"])
    return figures


def flop(shape: Shape) -> float:
    """Of both products of causal attention; only what a query may see counts."""
    seen = shape.queries * (shape.context - shape.queries) + shape.queries * (shape.queries + 1) / 2
    return 4.0 * shape.num_rows * shape.heads.query * shape.heads.dim * seen


def _works(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Attention]:
    """Every peer over the same numbers: the paged batch's, gathered into contiguous rows."""
    backend = checked_backend(device)
    rows = [(shape.queries, shape.context)] * shape.num_rows
    batch = make_batch(rows, shape.heads, block_size=16, dtype=dtype, device=device, seed=seed)
    q = batch.q.unflatten(0, (shape.num_rows, -1))  # [rows, queries, heads, dim]
    k, v = (cache.flatten(0, 1)[batch.slots].unflatten(0, (shape.num_rows, -1)) for cache in _caches(batch))
    works: dict[str, Attention] = {"paged": lambda: batch.attend(backend), "sdpa": _sdpa(q, k, v)}
    if device.type == "cuda" and importlib.util.find_spec(FLASH) is not None:
        works |= _flash(q, k, v)
    return works


def _caches(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.key_cache, batch.value_cache


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Attention:
    queries, keys, values = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v))
    causal = q.shape[1] > 1

    def work() -> torch.Tensor:
        out = scaled_dot_product_attention(queries, keys, values, is_causal=causal, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return work


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Attention]:
    """Contiguous, and paged with blocks of its own size in order."""
    from flash_attn import flash_attn_with_kvcache  # type: ignore[import-not-found]

    num_rows, context = k.shape[:2]
    lengths = torch.full((num_rows,), context, dtype=torch.int32, device=q.device)
    works = {"flash": lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)}
    if context % FLASH_BLOCK_SIZE == 0:
        paged_k, paged_v = (tensor.flatten(0, 1).unflatten(0, (-1, FLASH_BLOCK_SIZE)) for tensor in (k, v))
        table = torch.arange(len(paged_k), dtype=torch.int32, device=q.device).view(num_rows, -1)
        works["flash_paged"] = lambda: flash_attn_with_kvcache(
            q, paged_k, paged_v, cache_seqlens=lengths, block_table=table, causal=True
        )
    return works
