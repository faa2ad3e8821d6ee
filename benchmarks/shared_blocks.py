"""What it gains to read blocks that rows have in common once for all of them, and what it costs where nothing is.

    python -m benchmarks.shared_blocks --json

Decode attention of 64 rows whose first 1,024 tokens are in common and 130 their own, bf16, in the caches of several
layers by turns, so that none finds its blocks in the CPU's cache. `grouped` is told of what is shared and `ordinary`
is not; `own` has only what is the rows' own. They take turns, and a ratio is the median of those of neighbours in time.
Then what the executor's bookkeeping takes in a step where nothing is shared, against the attention of such rows in 28
layers, which is the least that such a step takes. `--smallest` shows instead how much rows must share before it pays.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from executor_svc.shared_segments import SegmentFinder
from kernels import Backend, Rows, Rule, SharedBlocks, backend

NUM_ROWS, SHARED, OWN = 64, 1024, 130
LAYERS, CACHES = 28, 6  # of a model; whose caches there are, 250 MB
HEADS, KV_HEADS, DIM, BLOCK = 16, 8, 128, 16
RULE = Rule(DIM**-0.5)


class Layers:
    """Caches of every layer, and rows that in groups of `group` have their first `shared` blocks in common."""

    def __init__(self, kernels: Backend, *, num_caches: int, group: int, shared: int, own_tokens: int) -> None:
        self._attention = kernels.paged_attention
        own = -(-own_tokens // BLOCK)
        num_groups = NUM_ROWS // group
        num_blocks = 1 + num_groups * shared + NUM_ROWS * own
        numbers = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(0)).int() + 1
        common = numbers[: num_groups * shared].view(num_groups, shared).repeat_interleave(group, 0)
        self.tables = torch.cat([common, numbers[num_groups * shared :].view(NUM_ROWS, own)], 1)
        self._own_tables = self.tables[:, shared:].contiguous()
        self._contexts = torch.full((NUM_ROWS,), shared * BLOCK + own_tokens, dtype=torch.int32)
        self._own_contexts = self._contexts - shared * BLOCK
        self._query_start = torch.arange(NUM_ROWS + 1, dtype=torch.int32)
        self._q = torch.randn(NUM_ROWS, HEADS, DIM, dtype=torch.bfloat16)
        allocate = kernels.allocate_caches
        cpu = torch.device("cpu")
        self._caches = [allocate(num_blocks, BLOCK, KV_HEADS, DIM, DIM, torch.bfloat16, cpu) for _ in range(num_caches)]
        k, v = torch.randn(2, num_blocks * BLOCK, KV_HEADS, DIM, dtype=torch.bfloat16)
        for keys, values in self._caches:
            kernels.write_kv(k, v, keys, values, torch.arange(num_blocks * BLOCK))
        starts = range(0, NUM_ROWS, group)
        self._shared = SharedBlocks(
            first=torch.zeros(num_groups, dtype=torch.int32),
            end=torch.full((num_groups,), shared, dtype=torch.int32),
            row_start=torch.tensor([*starts, NUM_ROWS], dtype=torch.int32),
            rows=torch.arange(NUM_ROWS, dtype=torch.int32),
            own_start=torch.full((NUM_ROWS,), shared, dtype=torch.int32),
        )
        self._turn = 0

    def grouped(self) -> torch.Tensor:
        return self._attend(self.tables, self._contexts, self._shared)

    def ordinary(self) -> torch.Tensor:
        return self._attend(self.tables, self._contexts, None)

    def own(self) -> torch.Tensor:
        return self._attend(self._own_tables, self._own_contexts, None)

    def _attend(self, tables: torch.Tensor, contexts: torch.Tensor, shared: SharedBlocks | None) -> torch.Tensor:
        """As the first layer of a step does: the others find the work planned."""
        self._turn += 1
        caches = self._caches[self._turn % len(self._caches)]
        return self._attention(self._q, *caches, Rows(tables, self._query_start, contexts, shared), RULE)


@dataclass(frozen=True, slots=True)
class Timed:
    """Milliseconds of each work's median, and the medians of ratios to the first one's neighbours in time."""

    ms: list[float]
    ratios: list[float]


def take_turns(works: list[Callable[[], object]], repeats: int) -> Timed:
    for work in works:
        work()
    taken = np.empty((repeats, len(works)))
    for i in range(repeats):
        for j, work in enumerate(works):
            begin = time.perf_counter()
            work()
            taken[i, j] = time.perf_counter() - begin
    ratios = np.median(taken[:, :1] / taken, axis=0)
    return Timed((np.median(taken, axis=0) * 1e3).tolist(), ratios.tolist())


def bookkeeping_us(repeats: int = 2000) -> float:
    """Of one decode step of rows that share nothing and have grown by a block each: more than such a step ever has."""
    width = (SHARED + OWN) // BLOCK + 1
    finder, rows = SegmentFinder(NUM_ROWS, BLOCK), np.arange(NUM_ROWS, dtype=np.int32)
    tables = np.arange(1, NUM_ROWS * width + 1, dtype=np.int32).reshape(NUM_ROWS, width)
    one, context, num_blocks = (np.full(NUM_ROWS, value, np.int32) for value in (1, SHARED + OWN, width))
    finder.changed(rows)
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        finder.grown(rows)
        finder.find(rows, one, context, tables, num_blocks)
        taken.append(time.perf_counter() - begin)
    return median(taken) * 1e6


def measure(kernels: Backend, num_caches: int, repeats: int) -> dict[str, object]:
    layers = Layers(kernels, num_caches=num_caches, group=NUM_ROWS, shared=SHARED // BLOCK, own_tokens=OWN)
    timed = take_turns([layers.ordinary, layers.grouped, layers.own], repeats)
    del layers
    apart = Layers(kernels, num_caches=1, group=1, shared=0, own_tokens=SHARED + OWN)
    attention = take_turns([apart.ordinary], repeats).ms[0] * LAYERS
    taken = bookkeeping_us()
    return {
        "backend": kernels.name,
        "threads": torch.get_num_threads(),
        "ordinary_ms": round(timed.ms[0], 3),
        "grouped_ms": round(timed.ms[1], 3),
        "own_ms": round(timed.ms[2], 3),
        "speedup": round(timed.ratios[1], 3),
        "bookkeeping_us": round(taken, 2),
        "unshared_attention_ms": round(attention, 2),
        "unshared_overhead": round(1 + taken / 1e3 / attention, 5),
    }


def smallest(kernels: Backend, num_caches: int, repeats: int) -> list[dict[str, object]]:
    """How much faster it is where groups of rows share few blocks: below 1 it does not pay."""
    found: list[dict[str, object]] = []
    for group in (2, 4, 16):
        for shared in (1, 2, 3, 4, 6, 8, 16):
            layers = Layers(kernels, num_caches=num_caches, group=group, shared=shared, own_tokens=OWN)
            timed = take_turns([layers.ordinary, layers.grouped], repeats)
            saved = (group - 1) * shared
            found.append({"rows": group, "blocks": shared, "saved_blocks": saved, "speedup": round(timed.ratios[1], 3)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--smallest", action="store_true", help="how much rows must share before it pays")
    parser.add_argument("--cpu-kernels", default="auto", help="level of the native kernels, or reference")
    parser.add_argument("--caches", type=int, default=CACHES, help="caches to go through")
    parser.add_argument("--repeats", type=int, default=60)
    arguments = parser.parse_args()
    kernels = backend(torch.device("cpu"), cpu_kernels=arguments.cpu_kernels)
    with torch.inference_mode():
        made = (smallest if arguments.smallest else measure)(kernels, arguments.caches, arguments.repeats)
    if arguments.json:
        print(json.dumps({"benchmark": "shared_blocks", "result": made}))
    else:
        for line in made if isinstance(made, list) else [made]:
            print("  ".join(f"{name} {value}" for name, value in line.items()))


if __name__ == "__main__":
    main()
