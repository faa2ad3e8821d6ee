"""How close attention of the CPU's native kernels comes to what memory gives, and what its block tables cost.

    python -m benchmarks.kernel [--json]

Decode of 64 sequences of 400 tokens, and of one of 16,384, with 16 query and 8 key/value heads of 128, bf16, blocks of
16 in shuffled tables. Calls go from one pair of caches to the next, over more than twice the last-level cache, so that
nothing is found there. Between two rounds of them the same threads read the same caches from end to end, as fast as
they can; what counts is the median over such pairs. The table's cost is that against a variant which computes where a
sequence's blocks are, in turns as well.

With --json the last line is
{"decode_bandwidth_ratio": .., "long_bandwidth_ratio": .., "paged_over_contiguous": ..}:
bytes of keys and values over bandwidth of reading (more is better), and time over time (less is better).
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels import Backend, Rows, Rule, native_backend
from kernels.cpu import supported
from kernels.cpu.library import ops

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 16
RULE = Rule(HEAD_DIM**-0.5)
LEAST_BYTES = 1 << 30  # where the size of the last-level cache is not known, or small


@dataclass(frozen=True)
class Decode:
    """A batch of equally long rows over several pairs of caches, each filled by rows in an order of its own."""

    backend: Backend
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    rows: list[Rows]
    q: torch.Tensor

    @classmethod
    def make(
        cls, backend: Backend, num_rows: int, context: int, least_bytes: int, block_size: int = BLOCK_SIZE
    ) -> "Decode":
        num_blocks = num_rows * -(-context // block_size)
        num_bytes = num_blocks * block_size * NUM_KV_HEADS * HEAD_DIM * 4
        query_start = torch.arange(num_rows + 1, dtype=torch.int32)
        context_lens = torch.full((num_rows,), context, dtype=torch.int32)
        caches, rows = [], []
        for _ in range(-(-least_bytes // num_bytes)):
            pair = backend.allocate_caches(
                num_blocks, block_size, NUM_KV_HEADS, HEAD_DIM, HEAD_DIM, torch.bfloat16, torch.device("cpu")
            )
            for cache in pair:
                cache.uniform_(-1, 1)
            caches.append(pair)
            rows.append(Rows(torch.randperm(num_blocks).int().view(num_rows, -1), query_start, context_lens))
        return cls(backend, caches, rows, torch.randn(num_rows, NUM_HEADS, HEAD_DIM).bfloat16())

    @property
    def num_bytes(self) -> int:
        """Of keys and values that one round attends to."""
        return sum(cache.nbytes for pair in self.caches for cache in pair)

    def attend(self) -> None:
        for pair, rows in zip(self.caches, self.rows, strict=True):
            self.backend.paged_attention(self.q, *pair, rows, RULE)

    def attend_without_tables(self) -> None:
        native, rows = ops(self.backend.level), self.rows[0]
        width, sizes = rows.block_tables.shape[1], (len(rows), NUM_HEADS, *self.caches[0], 0)
        plan = native.plan_attention(None, width, rows.query_start, rows.context_lens, [], *sizes)
        for keys, values in self.caches:
            native.paged_attention(self.q, keys, values, plan, RULE.scale, 0.0, None)

    def read(self) -> None:
        native = ops(self.backend.level)
        for keys, values in self.caches:
            native.read_bandwidth_probe(_memory(keys, values))


def _memory(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """All of what the two have in common, from end to end, with what lies between blocks."""
    memory = keys.untyped_storage()
    assert values.untyped_storage().data_ptr() == memory.data_ptr()
    return keys.as_strided((memory.nbytes() // keys.itemsize,), (1,), 0)


def seconds(function: Callable[[], None]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def ratio_of(function: Callable[[], None], other: Callable[[], None], num_pairs: int) -> tuple[float, float]:
    """The median over pairs of function's time over other's, and function's own median seconds."""
    function()
    other()
    pairs = [(seconds(function), seconds(other)) for _ in range(num_pairs)]
    return statistics.median(a / b for a, b in pairs), statistics.median(a for a, _ in pairs)


def last_level_cache_bytes() -> int:
    """As the operating system tells; of a virtual machine it may tell a part, or all of the host's. 0 if unknown."""
    names = [name for name in ("SC_LEVEL3_CACHE_SIZE", "SC_LEVEL4_CACHE_SIZE") if name in os.sysconf_names]
    return max((os.sysconf(name) for name in names), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernel", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="End with one line of JSON.")
    parser.add_argument("--level", choices=supported(), default=supported()[0], help="Instructions; the CPU's best.")
    parser.add_argument("--pairs", type=int, default=21, help="Pairs of rounds that a median is taken of.")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    backend = native_backend(arguments.level)
    least_bytes = max(LEAST_BYTES, 2 * last_level_cache_bytes() + (64 << 20))
    figures = {}
    print(f"{backend.name}, {torch.get_num_threads()} threads, rounds of {least_bytes >> 20} MiB or more")
    for name, num_rows, context in (("decode", 64, 400), ("long", 1, 16384)):
        decode = Decode.make(backend, num_rows, context, least_bytes)
        slower, attended_s = ratio_of(decode.attend, decode.read, arguments.pairs)
        figures[f"{name}_bandwidth_ratio"] = round(1 / slower, 3)
        rate = decode.num_bytes / attended_s / 1e9
        print(f"{name}: {num_rows} x {context} tokens at {rate:.1f} GB/s, {1 / slower:.3f} of reading's rate")
        if name == "decode":
            paged, _ = ratio_of(decode.attend, decode.attend_without_tables, arguments.pairs)
            figures["paged_over_contiguous"] = round(paged, 3)
            print(f"decode: {paged:.3f} of the time without tables")
        del decode
    if arguments.json:
        order = ("decode_bandwidth_ratio", "long_bandwidth_ratio", "paged_over_contiguous")
        print(json.dumps({key: figures[key] for key in order}))


if __name__ == "__main__":
    main()
