"""How soon two schedulers share one executor fairly, and what it costs the first: real processes, a simulated executor.

A scheduler has the executor to itself and more requests than rows. Then

* a second one with as many attaches: `attach_to_fair_s` until each has half of the blocks, to within 5 %, from the
  moment at which the second begins to connect (its tokenizer and first requests included);
* the second is killed (SIGKILL): `reclaim_s` until the first has all blocks again;
* `worst_share`: tokens of the first in any half second, relative to its share of what it made alone: half from
  the second's begin until all is reclaimed, everything from half a second later on;
* beside it what half a second of this machine may be off by with no lease in motion: `worst_share_alone` of the
  lone scheduler before the second attaches, and `worst_share_settled` while both have had their halves for a while.
  Only what `worst_share` is below these is the price of moving leases.

Times and shares are the worst of all runs. A scheduler here is the engine with all below it (text, core, link), in a
process of its own; requests are made inside of that process, so gRPC is left out.
"""

import argparse
import asyncio
import json
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import structlog
import uvloop

from benchmarks.link import simulated_executor
from scheduler_svc.collecting import collect_rarely
from scheduler_svc.core.sequence import Sampling
from scheduler_svc.engine import Engine
from scheduler_svc.requests import GenerationRequest
from scheduler_svc.settings import SchedulerSettings

NUM_BLOCKS, NUM_ROWS = 1280, 64
EXECUTOR = ["--num-blocks", str(NUM_BLOCKS + 1), "--max-rows", str(NUM_ROWS), "--tokens-per-step", "512"]
LATENCY = ["--simulate-fixed-us", "10000", "--simulate-per-token-us", "10"]
NUM_REQUESTS = 96  # at any time, of each scheduler
PROMPT_TOKENS, OUTPUT_TOKENS = (32, 96), (64, 256)
SAMPLE_S, WINDOW_S, RESTFUL_S = 0.01, 0.5, 0.1
NEARLY = 0.95  # of half of the blocks
TOO_LONG_S = 30.0
SHARES = ("worst_share", "worst_share_alone", "worst_share_settled")
GROWS_S = 0.5  # after a lease has grown, until throughput is looked at: more prompts are computed first


@dataclass(frozen=True, slots=True)
class Sample:
    """What a scheduler has at one moment; `at` is seconds of the system's clock, `tokens` counts from its begin."""

    at: float
    num_blocks: int
    num_tokens: int


def scheduler(endpoint: str, name: str, orders: Connection) -> None:
    """A process: waits for a word, then drives the executor under load and tells how it stands, until it is killed."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    collect_rarely()  # as the service does
    uvloop.run(_drive(endpoint, name, orders))


async def _drive(endpoint: str, name: str, orders: Connection) -> None:
    with tempfile.TemporaryDirectory() as directory:
        cache_dir = Path(directory) / "tokenizers"
        settings = SchedulerSettings(executor_endpoint=endpoint, scheduler_id=name, cache_dir=cache_dir, max_losses=2)
        engine = Engine(settings)
        orders.send(None)  # ready
        orders.recv()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(engine.run())
            tasks.create_task(_tell(engine, orders))
            while not engine.ready:
                await asyncio.sleep(SAMPLE_S)
            for number in range(NUM_REQUESTS):
                tasks.create_task(_ask_on(engine, f"{name} {number}"))


async def _ask_on(engine: Engine, name: str) -> None:
    chance = random.Random(name)
    number = 0
    while True:
        number += 1
        prompt = [chance.randint(300, 30_000) for _ in range(chance.randint(*PROMPT_TOKENS))]
        length = chance.randint(*OUTPUT_TOKENS)
        request = GenerationRequest(f"{name} {number}", prompt, Sampling(temperature=0), length, ignore_eos=True)
        async for _ in engine.generate(request):
            pass


async def _tell(engine: Engine, orders: Connection) -> None:
    while True:
        num_blocks = sum(scheduler.state.cache.pool.num_leased for scheduler in engine.fleet.schedulers)
        orders.send(Sample(time.monotonic(), num_blocks, engine.fleet.counters.generated_tokens))
        await asyncio.sleep(SAMPLE_S)


@dataclass(slots=True)
class Watched:
    """A scheduler's process and all that it has told so far."""

    process: BaseProcess
    orders: Connection
    samples: list[Sample] = field(default_factory=list)

    @classmethod
    def start(cls, endpoint: str, name: str) -> "Watched":
        """Ready to begin at a word."""
        context = multiprocessing.get_context("spawn")
        mine, its = context.Pipe()
        process = context.Process(target=scheduler, args=(endpoint, name, its), daemon=True)
        process.start()
        mine.recv()
        return cls(process, mine)

    @property
    def num_blocks(self) -> int:
        return self.samples[-1].num_blocks if self.samples else 0

    def begin(self) -> float:
        began = time.monotonic()
        self.orders.send(None)
        return began

    def listen(self) -> None:
        while self.orders.poll():
            self.samples.append(self.orders.recv())

    def rate(self, begin: float, end: float) -> float:
        """Tokens a second between two moments."""
        within = [sample for sample in self.samples if begin <= sample.at <= end]
        return (within[-1].num_tokens - within[0].num_tokens) / (within[-1].at - within[0].at)

    def worst_rate(self, begin: float, end: float) -> float:
        """Of all windows in this time."""
        starts = [sample.at for sample in self.samples if begin <= sample.at <= end - WINDOW_S]
        return min(self.rate(start, start + WINDOW_S) for start in starts)


def watch(all_of: list[Watched], seconds: float) -> None:
    """Seldom, since whoever looks takes time from those who are measured; samples wait in their pipes."""
    end = time.monotonic() + seconds
    while (left_s := end - time.monotonic()) > 0:
        time.sleep(min(left_s, RESTFUL_S))
        for one in all_of:
            one.listen()


def watch_until(all_of: list[Watched], holds: Callable[[], bool]) -> float:
    """Returns the time at which it held."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > TOO_LONG_S:
            raise RuntimeError(f"not within {TOO_LONG_S:g} s; leases: {[one.num_blocks for one in all_of]}")
        time.sleep(SAMPLE_S / 2)
        for one in all_of:
            one.listen()
    return time.monotonic()


def one_run(seconds: float) -> dict[str, float]:
    """`seconds` is how long each state is looked at."""
    with simulated_executor(*EXECUTOR, *LATENCY) as endpoint:
        first, second = Watched.start(endpoint, "first"), Watched.start(endpoint, "second")
        try:
            first.begin()
            watch_until([first], lambda: first.num_blocks == NUM_BLOCKS and first.samples[-1].num_tokens > 0)
            watch([first], 2.0)
            began = time.monotonic()
            watch([first], 2 * seconds)
            alone = first.rate(began, time.monotonic())

            attached = second.begin()
            half = NEARLY * NUM_BLOCKS / 2
            fair = watch_until([first, second], lambda: min(first.num_blocks, second.num_blocks) >= half)
            watch([first, second], seconds)
            second.process.kill()
            killed = time.monotonic()
            reclaimed = watch_until([first], lambda: first.num_blocks == NUM_BLOCKS)
            watch([first], GROWS_S + seconds)
            shares = [
                first.worst_rate(attached, reclaimed) / (alone / 2),
                first.worst_rate(reclaimed + GROWS_S, reclaimed + GROWS_S + seconds) / alone,
            ]
            return {
                "attach_to_fair_s": fair - attached,
                "reclaim_s": reclaimed - killed,
                "worst_share": min(shares),
                "worst_share_alone": first.worst_rate(began, attached) / alone,
                "worst_share_settled": first.worst_rate(fair + GROWS_S, killed) / (alone / 2),
                "second_share": second.rate(fair + GROWS_S, killed) / (alone / 2),
            }
        finally:
            for one in (first, second):
                one.process.kill()
                one.process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="for which each state is looked at")
    args = parser.parse_args()
    runs = [one_run(args.seconds) for _ in range(args.runs)]
    figures = {
        "attach_to_fair_s": round(max(run["attach_to_fair_s"] for run in runs), 3),
        "reclaim_s": round(max(run["reclaim_s"] for run in runs), 3),
        **{name: round(min(run[name] for run in runs), 3) for name in SHARES},
    }
    if args.json:
        print(json.dumps(figures))
        return
    print(f"a fair split {figures['attach_to_fair_s']:.2f} s after the second scheduler began to attach;")
    print(f"all reclaimed {figures['reclaim_s']:.2f} s after it was killed;")
    print(f"the first never made less than {figures['worst_share']:.0%} of its share in half a second")
    print(f"({figures['worst_share_alone']:.0%} alone, {figures['worst_share_settled']:.0%} with halves that stay),")
    print(f"the second {min(run['second_share'] for run in runs):.0%} of its own, on average")


if __name__ == "__main__":
    main()
