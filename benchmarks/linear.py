"""Linear layers over packed weights: `python -m benchmarks.linear [--json] [--rows 1 64] [--shapes 4096x1024]`.

For each number of rows and shape [outputs]x[inputs] (those of a Qwen3 0.6B unless told otherwise) it measures, in
turns: the native product, torch's F.linear, oneDNN with its own packing, and the two limits with the same threads:
reading as many bytes as the weight has, and bf16 dot products on registers. Weights rotate over 400 MB, so that they
come from memory. `of limit` is the time that the slower limit takes over the product's; `over torch` and `over oneDNN`
are their times over the product's; all are medians of neighbours in time. With `--int8` the product has int8 weights.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F

from benchmarks.gpu.timing import take_turns
from kernels.cpu import linear
from kernels.cpu.library import ops

ROWS = (1, 4, 16, 64, 256, 1024)
SHAPES = ("4096x1024", "1024x2048", "6144x1024", "1024x3072", "151936x1024")
ROTATED_BYTES = 400 << 20
PROBE_ROUNDS = 100_000
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
    over_onednn: float
    over_bf16: float | None  # of int8


def main() -> None:
    args = _arguments()
    torch.set_grad_enabled(False)
    log = sys.stderr if args.json else sys.stdout
    print("rows  shape          ms     TFLOP/s  GB/s   of limit  over torch  over oneDNN  over bf16", file=log)
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
    native = ops()
    x = torch.randn(rows, weights[0].shape[1]).to(torch.bfloat16)
    flops, num_bytes = 2 * rows * weights[0].numel(), weights[0].nbytes
    works: dict[str, list[Callable[[], object]]] = {
        "native": [partial(linear.linear, x, weight) for weight in packed],
        "read": [partial(native.read_bandwidth_probe, weight) for weight in [*weights[1:], weights[0]]],
        "dot": [partial(native.dot_rate_probe, PROBE_ROUNDS)],
        "torch": [partial(F.linear, x, weight) for weight in weights],
    }
    onednn = [torch.ops.mkldnn._reorder_linear_weight(weight, rows) for weight in weights]
    packed_linear = torch.ops.mkldnn._linear_pointwise
    works["onednn"] = [partial(packed_linear, x, weight, None, "none", [], "") for weight in onednn]
    if quantized:
        works["int8"] = [partial(linear.linear, x, weight) for weight in quantized]
    at_best = max(flops / 1e12, num_bytes / 1e11)
    repeats = max(5, min(100, int(SECONDS / (len(works) * at_best))))
    seconds = take_turns(works, repeats, torch.device("cpu"))

    dot_flops = native.dot_rate_probe(1) * PROBE_ROUNDS
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
        over_onednn=_ratio(seconds["onednn"], product),
        over_bf16=_ratio(seconds["native"], product) if quantized else None,
    )


def _ratio(of: Sequence[float], to: Sequence[float]) -> float:
    return median(a / b for a, b in zip(of, to, strict=True))


def _line(found: Figures) -> str:
    over_bf16 = "" if found.over_bf16 is None else f"{found.over_bf16:.2f}"
    return (
        f"{found.rows:4}  {found.shape:12} {found.milliseconds:8.3f}  {found.teraflops:7.2f}  {found.gigabytes:5.0f}"
        f"  {found.of_limit:9.2f}  {found.over_torch:10.2f}  {found.over_onednn:11.2f}  {over_bf16:>9}"
    )


def _summary(figures: Sequence[Figures]) -> dict[str, dict[str, float]]:
    """For each number of rows the smallest ratios of all shapes."""
    rows = sorted({found.rows for found in figures})
    return {
        str(count): {
            name: round(min(getattr(found, name) for found in figures if found.rows == count), 3)
            for name in ("of_limit", "over_torch", "over_onednn")
        }
        for count in rows
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
