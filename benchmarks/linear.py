"""Linear layers over packed weights: `python -m benchmarks.linear [--json] [--rows 1 64] [--shapes 4096x1024]`.

For each number of rows and shape [outputs]x[inputs] (those of a Qwen3 0.6B unless told otherwise) it measures, in
turns: the native product, torch's F.linear, oneDNN with its own packing, and the two limits with the same threads:
reading as many bytes as the weight has, and multiplying on registers as the native product does (csrc/dot_rate.h):
tiles, dot products of bf16, or fp32. oneDNN packs bf16 only for CPUs with instructions for it; on others the product
stands beside F.linear of rows and weights kept in fp32 instead. Weights rotate over 400 MB, so that they come from
memory. `of limit` is the time that the slower limit takes over the product's; `over torch`, `over oneDNN` and `over
fp32` are their times over the product's; all are medians of neighbours in time. With `--int8` the product has int8
weights.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median

import torch
import torch.nn.functional as F

from benchmarks.gpu.timing import take_turns
from kernels.cpu import linear
from kernels.cpu.library import ops

ROWS = (1, 4, 16, 64, 256, 1024)
SHAPES = ("4096x1024", "1024x2048", "6144x1024", "1024x3072", "151936x1024")
ROTATED_BYTES = 400 << 20
PROBE_SECONDS = 2e-3  # of what multiplies on registers, at least: its first tenths of a millisecond are slower
OPENMP_WAITS_SECONDS = 0.01  # awake, more or less, for work: torch's threads would have a core that ours need
SECONDS = 0.6  # of each measurement, about
MAX_OUTPUT_BYTES = 64 << 20  # wider outputs are not made: nobody wants the logits of a whole prompt


@dataclass(frozen=True, slots=True)
class Figures:
    rows: int
    shape: str
    milliseconds: float
    teraflops: float
    gigabytes: float
    of_limit: float
    over_torch: float
    over_onednn: float | None  # both as _others gives them
    over_fp32: float | None
    over_bf16: float | None  # of int8


def main() -> None:
    args = _arguments()
    torch.set_grad_enabled(False)
    log = sys.stderr if args.json else sys.stdout
    print(
        "rows  shape          ms     TFLOP/s  GB/s   of limit  over torch  over oneDNN  over fp32  over bf16", file=log
    )
    figures = []
    for shape in args.shapes:
        outputs, inputs = map(int, shape.split("x"))
        weights = _weights(outputs, inputs)
        packed = [linear.pack(weight) for weight in weights]
        quantized = [linear.pack(weight, int8=True) for weight in weights] if args.int8 else []
        for rows in args.rows:
            if rows * outputs * 2 > MAX_OUTPUT_BYTES and rows > 64:
                continue
            found = _measure(shape, rows, weights, packed, quantized)
            figures.append(found)
            print(_line(found), file=log, flush=True)
    if args.json:
        print(json.dumps(_summary(figures)))


def _weights(outputs: int, inputs: int) -> list[torch.Tensor]:
    copies = max(2, -(-ROTATED_BYTES // (outputs * inputs * 2)))
    one = torch.randn(outputs, inputs).div_(inputs**0.5).to(torch.bfloat16)
    return [one.clone() for _ in range(copies)]


def _measure(
    shape: str,
    rows: int,
    weights: Sequence[torch.Tensor],
    packed: Sequence[linear.PackedWeight],
    quantized: Sequence[linear.PackedWeight],
) -> Figures:
    native, probe_rounds = ops(), _probe_rounds()
    x = torch.randn(rows, weights[0].shape[1]).to(torch.bfloat16)
    flops, num_bytes = 2 * rows * weights[0].numel(), weights[0].nbytes
    works: dict[str, list[Callable[[], object]]] = {
        "rest": [partial(time.sleep, OPENMP_WAITS_SECONDS)],
        "native": [partial(linear.linear, x, weight) for weight in packed],
        "read": [partial(native.read_bandwidth_probe, weight) for weight in [*weights[1:], weights[0]]],
        "dot": [partial(native.dot_rate_probe, probe_rounds)],
        "torch": [partial(F.linear, x, weight) for weight in weights],
        **_others(x, weights),
    }
    if quantized:
        works["int8"] = [partial(linear.linear, x, weight) for weight in quantized]
    at_best = max(flops / 1e12, num_bytes / 1e11)
    repeats = max(5, min(100, int(SECONDS / (len(works) * at_best))))
    seconds = take_turns(works, repeats, torch.device("cpu"))

    dot_flops = native.dot_rate_probe(1) * probe_rounds
    limits = [max(read, dot * flops / dot_flops) for read, dot in zip(seconds["read"], seconds["dot"], strict=True)]
    product = seconds["int8" if quantized else "native"]
    took = median(product)
    return Figures(
        rows,
        shape,
        milliseconds=1e3 * took,
        teraflops=flops / took / 1e12,
        gigabytes=(quantized[0].num_bytes if quantized else num_bytes) / took / 1e9,
        of_limit=_ratio(limits, product),
        over_torch=_ratio(seconds["torch"], product),
        over_onednn=_ratio(seconds["onednn"], product) if "onednn" in seconds else None,
        over_fp32=_ratio(seconds["fp32"], product) if "fp32" in seconds else None,
        over_bf16=_ratio(seconds["native"], product) if quantized else None,
    )


@cache
def _probe_rounds() -> int:
    """Those of a level differ in what they multiply by a hundred times."""
    rounds = 10_000
    while True:
        began = time.perf_counter()
        ops().dot_rate_probe(rounds)
        if time.perf_counter() - began >= PROBE_SECONDS:
            return rounds
        rounds *= 2


def _others(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> dict[str, list[Callable[[], object]]]:
    """The fastest products that this CPU is offered elsewhere."""
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packed = [torch.ops.mkldnn._reorder_linear_weight(weight, x.shape[0]) for weight in weights]
        product = torch.ops.mkldnn._linear_pointwise
        return {"onednn": [partial(product, x, weight, None, "none", [], "") for weight in packed]}
    wide_x = x.float()
    return {"fp32": [partial(F.linear, wide_x, weight.float()) for weight in weights]}


def _ratio(of: Sequence[float], to: Sequence[float]) -> float:
    return median(a / b for a, b in zip(of, to, strict=True))


def _line(found: Figures) -> str:
    over = {
        name: "" if value is None else f"{value:.2f}"
        for name, value in (("onednn", found.over_onednn), ("fp32", found.over_fp32), ("bf16", found.over_bf16))
    }
    return (
        f"{found.rows:4}  {found.shape:12} {found.milliseconds:8.3f}  {found.teraflops:7.2f}  {found.gigabytes:5.0f}"
        f"  {found.of_limit:9.2f}  {found.over_torch:10.2f}  {over['onednn']:>11}  {over['fp32']:>9}  {over['bf16']:>9}"
    )


def _summary(figures: Sequence[Figures]) -> dict[str, dict[str, float]]:
    """For each number of rows the smallest ratios of all shapes, of those that there are on this CPU."""
    names = [
        name
        for name in ("of_limit", "over_torch", "over_onednn", "over_fp32")
        if all(getattr(found, name) is not None for found in figures)
    ]
    return {
        str(rows): {
            name: round(min(getattr(found, name) for found in figures if found.rows == rows), 3) for name in names
        }
        for rows in sorted({found.rows for found in figures})
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.linear", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON, the table to standard error")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, metavar="ROWS")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="OUTPUTSxINPUTS")
    parser.add_argument("--int8", action="store_true", help="measure int8 weights; limits stay those of bf16")
    return parser.parse_args()


if __name__ == "__main__":
    main()
