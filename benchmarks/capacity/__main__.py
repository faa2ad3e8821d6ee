"""How many schedulers and executors a load takes.

    python -m benchmarks.capacity [--json] [--measure MODEL] [--save FILE | --pieces FILE] [...]

Measured on this machine: how long the steps of a real executor take, what a real scheduler's work costs, piece by
piece; and, so that the rest can be believed, one executor with one and two schedulers as processes beside the
simulation of them. Then, for executors of several step times and the lengths of two data sets, how many schedulers
each one needs; and how many of both for so many requests a second. docs/capacity.md says how to read it.
"""

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.capacity import plans, report
from benchmarks.capacity.costs import SchedulerCosts, TaskCosts
from benchmarks.capacity.latency import StepLatency
from benchmarks.capacity.measuring import Say, scheduler_costs
from benchmarks.capacity.observed import ObservationFailed, Room
from benchmarks.capacity.pieces import Pieces, PiecesFileError
from benchmarks.capacity.sizing import TooFast
from benchmarks.capacity.steps import measured
from benchmarks.capacity.validation import validated
from benchmarks.claims.requests import TraceError, drawn_mix, trace_mix
from benchmarks.claims.served import ServingFailed
from paged.cli.processes import ServiceFailed
from paged.load.lengths import MIXES

LONGEST = 4096
Figures = dict[str, object]


async def measure(args: argparse.Namespace) -> Figures:
    began = time.perf_counter()

    def section(name: str) -> None:
        print(f"== {name} ({time.perf_counter() - began:.0f} s)", flush=True)

    pieces = Pieces.load(args.pieces) if args.pieces else await _pieces(args, section)
    if args.save:
        pieces.save(args.save)
    mixes = [trace_mix(args.trace, LONGEST)] if args.trace else [drawn_mix(name, LONGEST) for name in MIXES]
    room = Room(args.max_rows, args.num_blocks, args.tokens_per_step)
    section("an executor and its schedulers, simulated")
    latencies = [*(_made(args, fixed_ms) for fixed_ms in args.fixed_ms), pieces.latency]
    kinds = [plans.Kind(latency, mix, room) for latency in latencies for mix in mixes]
    executors = [plans.for_an_executor(kind, pieces.costs) for kind in kinds]
    section("fleets, simulated")
    fleet = plans.Kind(_made(args, args.fleet_fixed_ms), mixes[-1], room)
    try:
        fleets = plans.for_a_rate(fleet, pieces.costs, args.rate, args.ttft_ms / 1e3)
    except TooFast as reason:
        print(f"  none: {reason}")
        fleets = []
    return {
        "latency": asdict(pieces.latency),
        "costs": _told(pieces.costs),
        "validation": pieces.validation,
        "load": plans.LOAD,
        "doubling": [args.doubling_tokens, args.doubling_context],
        "executors": executors,
        "fleet_mix": fleet.mix.name,
        "fleet_fixed_ms": args.fleet_fixed_ms,
        "ttft_ms": args.ttft_ms,
        "fleets": fleets,
        "seconds": round(time.perf_counter() - began),
    }


async def _pieces(args: argparse.Namespace, section: Say) -> Pieces:
    from executor_svc.model.demo_model import demo_model_path

    def say(text: str) -> None:
        print(f"  {text}", flush=True)

    section("how long a model's steps take")
    found = await measured(["--model", str(args.measure or demo_model_path()), *args.executor_flag])
    say(", ".join(f"{name} {value:.4g}" for name, value in asdict(found.latency).items()))
    errors = ", ".join(f"{shape} {error:+.0%}" for shape, error in found.errors.items())
    say(f"{found.num_steps} steps; the sum is off by (rows x prompt): {errors}")
    section("what a scheduler's work costs")
    costs = await scheduler_costs(say)
    section("simulated beside real processes")
    return Pieces(found.latency, costs, await validated(costs, drawn_mix("short", LONGEST), say))


def _made(args: argparse.Namespace, fixed_ms: float) -> StepLatency:
    fixed_us = 1e3 * fixed_ms
    return StepLatency(fixed_us, fixed_us / args.doubling_tokens, 1e3 * fixed_us / args.doubling_context)


def _told(costs: SchedulerCosts) -> Figures:
    def us(tasks: TaskCosts) -> dict[str, float]:
        return {name.removesuffix("_s"): round(1e6 * value, 3) for name, value in asdict(tasks).items()}

    return {
        "loop_us": us(costs.loop),
        "process_us": us(costs.process),
        "idle_mb": round(costs.idle_bytes / 1e6, 1),
        "stream_kb": round(costs.stream_bytes / 1e3, 2),
    }


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.capacity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    room = Room()
    add = parser.add_argument
    add("--json", action="store_true", help="end with one line of JSON")
    add("--measure", metavar="MODEL", help="model whose steps are timed, as for paged-executor; the demo's if unset")
    add("--executor-flag", action="append", default=[], help="one more for that executor; repeatable")
    add("--save", type=Path, metavar="FILE", help="keep all that is measured, as JSON")
    add("--pieces", type=Path, metavar="FILE", help="measure nothing: take what --save has kept")
    add("--trace", type=Path, help="CSV of prompt_tokens,output_tokens instead of the two mixes")
    add("--fixed-ms", type=_positive, nargs="+", default=[4.0, 8.0, 16.0, 32.0], help="fixed parts of steps to look at")
    add("--doubling-tokens", type=int, default=256, help="tokens in a step that take as long as its fixed part")
    add("--doubling-context", type=int, default=131_072, help="tokens of context that take as long as that")
    add("--max-rows", type=int, default=room.max_rows, help="of such an executor")
    add("--num-blocks", type=int, default=room.num_blocks, help="of such an executor, of 16 tokens each")
    add("--tokens-per-step", type=int, default=room.tokens_per_step, help="of such an executor")
    add("--rate", type=_positive, nargs="+", default=[10.0, 100.0, 1000.0, 4000.0], help="requests a second for fleets")
    add("--fleet-fixed-ms", type=_positive, default=16.0, help="fixed part of their executors' steps")
    add("--ttft-ms", type=_positive, default=500.0, help="bound of the 99th percentile of the time to first token")
    return parser


def main() -> None:
    args = _parser().parse_args()
    try:
        figures = asyncio.run(measure(args))
    except (ServiceFailed, ServingFailed, ObservationFailed, PiecesFileError, TraceError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted")
    report.print_tables(figures)
    print(f"\n{figures['seconds']} s")
    if args.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
