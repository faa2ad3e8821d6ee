"""Streamed tokens per second, per second of a scheduler's CPU, per message, and how late they are.

Schedulers over simulated executors with steps of 10 ms, all real processes on this machine, and readers in a process of
their own that always has so many streams open: prompts of 32 to 96 tokens, outputs of 256 to 768. Streams go to the
schedulers in turn, once in a few calls together (GenerateMany), once in a call each. Of each run: tokens that readers
got per second; the same per second of CPU of all schedulers; tokens per message; time from sending a request to its
first token (ttft_ms), between the messages of a stream (itl_ms; each brings one token or several), and in the scheduler
from a result's arrival to its message being handed to gRPC (write_ms, whose percentiles are upper bounds of a fine
histogram).

Beside each run, what gRPC alone takes: the schedulers' CPU for a message, all that is done for it included (message_us)
and that of a grpc.aio server that does nothing but send messages as large, as often, to as many streams of the same
readers (bare_message_us; bare_messages_s is how many of them it got rid of).

With --memory: resident memory of a scheduler before, while and after 4,096 streams of 2,000 tokens are open, twice, a
line for each kind of calls.
"""

import argparse
import asyncio
import itertools
import json
import os
import sys

import numpy as np

from benchmarks.serving.bare import bare
from benchmarks.serving.memory import memory_mb
from benchmarks.serving.streams import Window, served, watch
from paged.cli.processes import ServiceFailed
from paged.load.generator import Load
from paged.load.seen import percentiles_ms
from paged.v1 import control_pb2

CALLS = SHARED, OWN = "shared", "own"
STREAMS = (256, 1024, 4096)
SETTLE_S, MEASURED_S, BARE_S = 3.0, 8.0, 4.0
SHOWN = (50, 99)  # percentiles
CORES_FOR_FOUR = 10  # schedulers: theirs, executor's and readers'

Figures = dict[str, object]


async def run(num_schedulers: int, num_streams: int, seconds: float, calls: str) -> Figures:
    async with served(num_schedulers, num_streams) as system:
        window = await watch(system, Load(system.target, num_streams, share_calls=calls == SHARED), SETTLE_S, seconds)
    messages, tokens = _streamed(window)
    per_scheduler = num_streams // num_schedulers
    period_ms = 1e3 * num_streams * window.seen.seconds / messages
    alone = await bare(per_scheduler, period_ms, round(tokens / messages), BARE_S)
    return {
        "calls": calls,
        **figures(num_schedulers, num_streams, window),
        "message_us": round(1e6 * sum(window.cpu_s) / messages, 1),
        "bare_message_us": round(alone.message_us, 1),
        "bare_messages_s": round(alone.messages_s),
    }


def figures(num_schedulers: int, num_streams: int, window: Window) -> Figures:
    seen, cpu_s = window.seen, sum(window.cpu_s)
    if seen.errors or seen.earlier_errors:
        print(f"errors: {seen.errors}, of earlier requests: {seen.earlier_errors}", file=sys.stderr)
    messages, tokens = _streamed(window)
    return {
        "schedulers": num_schedulers,
        "streams": num_streams,
        "tok_s": round(seen.tokens / seen.seconds),
        "tok_per_cpu_s": round(seen.tokens / cpu_s),
        "tok_per_message": round(tokens / messages, 2),
        "ttft_ms": percentiles_ms(seen.ttft_s, SHOWN),
        "itl_ms": percentiles_ms(seen.gaps_s, SHOWN),
        "write_ms": _write_percentiles(window),
        "scheduler_cores": round(cpu_s / seen.seconds / num_schedulers, 2),
        "executor_cores": round(window.executor_cpu_s / seen.seconds, 2),
    }


def _streamed(window: Window) -> tuple[int, int]:
    """Messages and tokens of all schedulers."""
    pairs = list(zip(window.before, window.after, strict=True))
    messages = sum(after.stream_messages - before.stream_messages for before, after in pairs)
    tokens = sum(after.streamed_tokens - before.streamed_tokens for before, after in pairs)
    if not messages:
        raise RuntimeError("nothing was streamed")
    return messages, tokens


def _write_percentiles(window: Window) -> dict[str, float]:
    """Upper bounds: each is the bound of the interval that the percentile is in."""
    pairs = zip(window.before, window.after, strict=True)
    counts = sum(_counts(after) - _counts(before) for before, after in pairs)
    bounds = [*window.after[0].result_to_write_s.bounds, float("inf")]
    ranks = np.cumsum(counts)
    if not len(ranks) or not ranks[-1]:
        return {}
    at = {f"p{p}": bounds[int(np.searchsorted(ranks, ranks[-1] * p / 100))] for p in SHOWN}
    return {name: round(1e3 * bound, 2) for name, bound in at.items()}


def _counts(load: control_pb2.GetLoadResponse) -> np.ndarray:
    return np.array(load.result_to_write_s.counts, np.int64)


def _say(row: Figures) -> None:
    print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)


async def measure(args: argparse.Namespace) -> list[Figures]:
    rows = []
    for calls, num_schedulers, num_streams in itertools.product(args.calls, args.schedulers, args.streams):
        rows.append(await run(num_schedulers, num_streams, args.seconds, calls))
        _say(rows[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    counts = (1, 2, 4) if (os.cpu_count() or 1) >= CORES_FOR_FOUR else (1, 2)
    parser.add_argument("--schedulers", type=int, nargs="+", default=counts)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--seconds", type=float, default=MEASURED_S, help="measured in each run")
    parser.add_argument(
        "--calls", choices=CALLS, nargs="+", default=CALLS, help="of streams: a few together, or one each"
    )
    parser.add_argument("--memory", action="store_true", help="the scheduler's memory, instead")
    args = parser.parse_args()
    try:
        if args.memory:
            for calls in args.calls:
                figures_mb = asyncio.run(memory_mb(share_calls=calls == SHARED))
                print(json.dumps({"calls": calls} | figures_mb))
            return
        rows = asyncio.run(measure(args))
    except ServiceFailed as error:
        sys.exit(str(error))
    if args.json:
        print(json.dumps({"runs": rows}))


if __name__ == "__main__":
    main()
