"""A scheduler that is asked for ten times what its executor can do: what becomes of those it takes, and of the rest.

One simulated executor whose steps take 20 ms and a little for each row, 32 rows, answers of 32 tokens. What it can do
at most is measured first; `sustainable` is four fifths of that. Then requests come at random (Poisson): at the
sustainable rate, at ten times that for a minute, and at the sustainable rate again. No request is made twice. A
request may wait for MAX_WAIT_S, a seventh of the time that its answer takes, or for what `--max-wait-s` says.

All answers are of one length, which is hard on who waits: those who start together end together, so that for a while
many places come free, and then none. Where the scheduler bounds the number of those who wait instead
(`--max-waiting-requests`), as many as that wait through all of such a pause.

`latency_ratio`: seconds from sending a request to the end of its answer, of those that were taken, under overload
beside the sustainable rate, at the median and at the 95th of a hundred (limit 1.5 each). `ttft_ratio`: to its first
token, at the median. `refusal_ms`: from sending a request to its being refused, at the median (limit 50).
`refused_late`: the share of refusals that took longer than LATE_S, for they were let wait and got in too late.
`recovered_ratio`: as latency_ratio, after the overload. `goodput`: answers a second under overload, as a share of the
most it can do. Exits with 1 where a figure passes one of BOUNDS.
"""

import argparse
import asyncio
import random
import sys
import time
from dataclasses import dataclass, field
from statistics import median, quantiles

import uvloop

from benchmarks.bounds import tell
from benchmarks.capacity.latency import StepLatency
from benchmarks.capacity.observed import Room, System
from paged.cli.processes import while_alive
from paged.client import Client, ResourceExhaustedError, Retries

STEP, ROOM = StepLatency(20_000, 50), Room(max_rows=32, num_blocks=1024, tokens_per_step=512)
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 32
MAX_WAIT_S, LATE_S = 0.1, 0.05
SUSTAINABLE, TIMES = 0.8, 10
MOST_S, SUSTAINED_S, OVERLOAD_S = 6.0, 15.0, 60.0
MEMORY_POLL_S = 0.25
BOUNDS = {
    "latency_ratio": 1.5,
    "refusal_ms": 50.0,
    "memory_grown_mb": 16.0,  # flat: what gRPC keeps for the calls of a moment, and nothing of those that have ended
    "recovered_ratio": 1.2,  # 15 s of a random load, beside another 15 s
    "used_blocks_after": 0,
    "num_other_errors": 0,
}


@dataclass(slots=True)
class Seen:
    """By clients, of requests sent within `seconds`."""

    seconds: float
    ttft_s: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    refusal_s: list[float] = field(default_factory=list)
    retry_after_s: list[float] = field(default_factory=list)
    other_errors: list[str] = field(default_factory=list)

    @property
    def latencies_s(self) -> tuple[float, float]:
        """At the median, and at the 95th of a hundred."""
        return median(self.latency_s), quantiles(self.latency_s, n=20)[-1]


async def ask(client: Client, seen: Seen, chance: random.Random) -> None:
    prompt = [chance.randrange(300, 30_000) for _ in range(PROMPT_TOKENS)]
    begin, first = time.perf_counter(), None
    try:
        async for _ in client.generate(prompt, max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True):
            first = first or time.perf_counter()
    except ResourceExhaustedError as error:
        seen.refusal_s.append(time.perf_counter() - begin)
        seen.retry_after_s.append(error.retry_after_s or 0.0)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        seen.other_errors.append(f"{type(error).__name__}: {error}")
    else:
        seen.latency_s.append(time.perf_counter() - begin)
        seen.ttft_s.append((first or begin) - begin)


async def arriving(client: Client, rate: float, seconds: float, seed: int) -> Seen:
    """Requests come at random, whatever becomes of those before; returns when all have ended."""
    seen, chance, asked = Seen(seconds), random.Random(seed), set()
    loop = asyncio.get_running_loop()
    at, end = loop.time(), loop.time() + seconds
    while (at := at + chance.expovariate(rate)) < end:
        await asyncio.sleep(max(at - loop.time(), 0))
        task = asyncio.create_task(ask(client, seen, chance))
        asked.add(task)
        task.add_done_callback(asked.discard)
    await asyncio.gather(*asked)
    return seen


async def most_requests_s(client: Client) -> float:
    """As many at once as there are rows, each followed by another."""
    seen, chance, end = Seen(MOST_S), random.Random(0), time.perf_counter() + MOST_S

    async def one_after_another() -> None:
        while time.perf_counter() < end:
            await ask(client, seen, chance)

    begin = time.perf_counter()
    await asyncio.gather(*(one_after_another() for _ in range(ROOM.max_rows)))
    return len(seen.latency_s) / (time.perf_counter() - begin)


async def measure(seconds: float, flags: list[str]) -> dict[str, object]:
    async with (
        System.started(STEP, ROOM, scheduler_flags=flags) as system,
        Client(system.addresses[0], retries=Retries(max_attempts=1)) as client,
    ):
        return await while_alive(figures(client, system, seconds), system.executor, *system.schedulers)


async def figures(client: Client, system: System, seconds: float) -> dict[str, object]:
    most = await most_requests_s(client)
    rate = SUSTAINABLE * most
    before = await arriving(client, rate, SUSTAINED_S, 1)
    memory_mb = [_memory_mb(system)]

    async def follow() -> None:
        while True:
            await asyncio.sleep(MEMORY_POLL_S)
            memory_mb.append(_memory_mb(system))

    following = asyncio.create_task(follow())
    overload = await arriving(client, TIMES * rate, seconds, 2)
    following.cancel()
    after = await arriving(client, rate, SUSTAINED_S, 3)
    load = await client.load()
    ratios = [during / at_rest for during, at_rest in zip(overload.latencies_s, before.latencies_s, strict=True)]
    other_errors = before.other_errors + overload.other_errors + after.other_errors
    recovered = [later / at_rest for later, at_rest in zip(after.latencies_s, before.latencies_s, strict=True)]
    return {
        "most_requests_s": round(most, 1),
        "sustainable_requests_s": round(rate, 1),
        "accepted": len(overload.latency_s),
        "refused": len(overload.refusal_s),
        "other_errors": sorted(set(other_errors))[:5],
        "num_other_errors": len(other_errors),
        "refused_at_sustainable": [len(before.refusal_s), len(after.refusal_s)],
        "goodput": round(len(overload.latency_s) / seconds / most, 3),
        "latency_s": [round(seconds, 3) for seconds in before.latencies_s],
        "latency_ratio": [round(ratio, 3) for ratio in ratios],
        "ttft_ratio": round(median(overload.ttft_s) / median(before.ttft_s), 2),
        "refusal_ms": round(median(overload.refusal_s) * 1e3, 2),
        "refused_late": round(sum(s > LATE_S for s in overload.refusal_s) / len(overload.refusal_s), 4),
        "retry_after_s": round(median(overload.retry_after_s), 2),
        "memory_grown_mb": round(max(memory_mb) - memory_mb[0], 1),
        "memory_mb": {"before": memory_mb[0], "most": max(memory_mb), "after": _memory_mb(system)},
        "recovered_ratio": [round(ratio, 3) for ratio in recovered],
        "used_blocks_after": load.used_blocks,
    }


def _memory_mb(system: System) -> float:
    return round(system.usages()[0].bytes / 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--seconds", type=float, default=OVERLOAD_S, help="of overload (default %(default)g)")
    bound = parser.add_mutually_exclusive_group()
    bound.add_argument("--max-wait-s", type=float, default=MAX_WAIT_S, help="the scheduler's (default %(default)g)")
    bound.add_argument("--max-waiting-requests", type=int, help="the scheduler's, without max-wait-s")
    arguments = parser.parse_args()
    flags = ["--max-wait-s", str(arguments.max_wait_s)]
    if arguments.max_waiting_requests is not None:
        flags = ["--max-waiting-requests", str(arguments.max_waiting_requests)]
    found = uvloop.run(measure(arguments.seconds, flags))
    sys.exit(tell(found, BOUNDS, as_json=arguments.json))


if __name__ == "__main__":
    main()
