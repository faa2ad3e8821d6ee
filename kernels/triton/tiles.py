"""How large the pieces are that one program of the attention kernel works on, without measuring at start.

Three kinds of batch get tiles of their own, told apart by shapes alone: `decode` (as many queries as rows, one query
a tile), `mixed` (some rows have more), `wide` (rows that fill the largest tile on average, so every key that is read
serves more queries). A tile holds as many (query, head) pairs as the tensor cores take at least, 16.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from kernels.checks import KernelInputError

ROOMY_BYTES = 200 * 1024  # of shared memory a block: Hopper and datacentre Blackwell
MAX_REGISTERS = 255  # a thread's; unsaid, ptxas spills some to seat more threads, which shared memory then forbids
MAX_SPLITS = 128
MIN_SPLIT_TOKENS = 256  # a shorter part costs more in the merge than it saves
PROGRAMS_PER_PROCESSOR = 2  # that a split context should give


@dataclass(frozen=True, slots=True)
class Tile:
    """`block_m` matrix rows: `queries` queries of `heads` heads. A step takes `keys` positions, `stages` at once."""

    block_m: int
    queries: int
    heads: int
    keys: int
    warps: int
    stages: int
    registers: int | None = MAX_REGISTERS


def power_of_two(size: int, least: int = 16) -> int:
    """The smallest power of two not below `size` nor `least`: what Triton's ranges and products must be."""
    return max(least, 1 << (size - 1).bit_length())


@lru_cache(maxsize=1024)
def tile_for(
    kind: str,
    group: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    shared_memory_bytes: int,
    capped: bool = False,
) -> Tile:
    """The tile of `kind` for `group` query heads a key/value head; `dtype` is the products', `capped` by a soft-cap.

    What limits a tile are 255 registers a thread (`benchmarks.kernel_resources` shows what each takes), and shared
    memory. 32-bit products have no tensor cores and need many registers: 16 matrix rows over 8 warps.
    Raises KernelInputError where heads are so large that nothing fits.
    """
    width = max(power_of_two(head_dim), power_of_two(value_dim))
    roomy = shared_memory_bytes >= ROOMY_BYTES
    if dtype == torch.float32:
        block_m, keys, warps = 16, 32 if width <= 64 else 16, 8
    elif width > 256:
        block_m, keys, warps = 32 if roomy else 16, 32, 8
    elif width > 128:
        block_m, keys, warps = 64, 32, 8
    elif kind == "wide":
        block_m, keys, warps = 128, 64 if width <= 64 or (roomy and not capped) else 32, 8
    else:
        block_m, keys, warps = 64, 64 if width <= 64 else 32, 4
    if kind == "decode":
        block_m = min(power_of_two(group), block_m)
        if block_m == 16 and width <= 256 and dtype != torch.float32:
            keys, warps = 64 if width <= 128 else 32, 4
    heads = -(-group // -(-group // block_m))
    queries = 1 if kind == "decode" else block_m // heads
    stages = _stages(block_m, keys, head_dim, value_dim, dtype, shared_memory_bytes)
    if stages == 0 or (width > 256 and dtype == torch.float32):
        raise KernelInputError(
            f"q: heads of {head_dim} with values of {value_dim} in {dtype} do not fit this GPU, which has "
            f"{shared_memory_bytes} bytes of shared memory a block; up to 256 always fit, larger ones in 16-bit types "
            "where there is memory"
        )
    # Told that it may use all registers, ptxas fetches so early for 128 rows that it spills; untold it does not.
    return Tile(block_m, queries, heads, keys, warps, stages, None if block_m == 128 else MAX_REGISTERS)


def _stages(
    block_m: int, keys: int, head_dim: int, value_dim: int, dtype: torch.dtype, shared_memory_bytes: int
) -> int:
    """As many stages, 4 at most, as let two programs share a processor; the keys of all but one are held."""
    step = keys * (power_of_two(head_dim) + power_of_two(value_dim)) * dtype.itemsize
    fixed = block_m * (power_of_two(head_dim) + keys) * dtype.itemsize
    for stages in (4, 3):
        if fixed + (stages - 1) * step <= shared_memory_bytes // 2:
            return stages
    return 2 if fixed + step <= shared_memory_bytes else 0


def kind_of(num_tokens: int, num_rows: int, group: int) -> str:
    """The kind of batch, see above. A batch with as many queries as rows may still hold longer and empty rows."""
    if num_tokens <= num_rows:
        return "decode"
    return "wide" if num_tokens * group >= 128 * num_rows else "mixed"


def num_splits(num_programs: int, longest: int, num_processors: int) -> int:
    """Into how many parts each context is cut, so that few long rows still occupy every processor.

    `num_programs` without a split; `longest` bounds the positions that a query can see, from the table's width and
    the window, for the lengths themselves are known to the device only. Parts behind a context's end cost little.
    """
    wanted = PROGRAMS_PER_PROCESSOR * num_processors // max(1, num_programs)
    return max(1, min(wanted, longest // MIN_SPLIT_TOKENS, MAX_SPLITS))
