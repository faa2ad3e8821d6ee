"""What this machine does at best with the threads that an executor gets: how fast it reads memory and multiplies.

Run by itself (`python -m benchmarks.serving.machine`), so that no engine shares the process: one line of JSON.
"""

import json
import time
from collections.abc import Callable
from statistics import median

import torch

from kernels.cpu import linear
from kernels.cpu.library import ops

FOOTPRINT_BYTES = 1 << 30  # several times the last cache
ROUNDS = 5
# Rows, columns and depth: two of the model's, and a large one.
PRODUCTS = ((1024, 6144, 1024), (1024, 1024, 3072), (2048, 4096, 4096))


def read_bytes_s() -> float:
    """Bytes read per second, in order, from far more memory than any cache holds."""
    memory = torch.ones(FOOTPRINT_BYTES, dtype=torch.uint8)
    read = ops().read_bandwidth_probe
    read(memory)
    return FOOTPRINT_BYTES / median(_seconds(lambda: read(memory)) for _ in range(ROUNDS))


def flop_s() -> float:
    """Floating point operations per second of the fastest product that is known here: torch's, oneDNN's of packed
    weights, or ours. Where a CPU has no instructions for bf16, torch's is of float32, which ours computes bf16 in."""
    return max(_product_flop_s(*shape) for shape in PRODUCTS)


def _product_flop_s(rows: int, columns: int, depth: int) -> float:
    x = torch.randn(rows, depth).to(torch.bfloat16)
    weight = torch.randn(columns, depth).to(torch.bfloat16)
    own = linear.pack(weight)
    ways: list[Callable[[], object]] = [lambda: linear.linear(x, own)]
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        ways.append(lambda: torch.nn.functional.linear(x, weight))
        ways.append(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""))
    else:
        wide_x, wide_weight = x.float(), weight.float()
        ways.append(lambda: torch.nn.functional.linear(wide_x, wide_weight))
    best = 0.0
    for way in ways:
        way()
        best = max(best, 2 * rows * columns * depth / median(_seconds(way) for _ in range(ROUNDS)))
    return best


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    with torch.inference_mode():
        print(json.dumps({"read_bytes_s": read_bytes_s(), "flop_s": flop_s(), "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
