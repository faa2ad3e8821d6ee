"""What ten streams, and whoever asks for health, notice of others who behave badly.

A simulated executor whose steps take STEP_MS, and one scheduler; the streams are read all the time. Then, one after
another:

*Readers who do not read*: NUM_STOPPED more streams, with log-probabilities; of each one message is read, and no more.
`rate_lost`: the ten's tokens a second alone, divided by those beside them.

*Texts that are far too long*, sent by a process of its own: one of 20 MB and fifty at once, which are more than a
message may have; one of 15 MB, which is taken and then refused; a million letters and as many emoji which are tokenized
to their end, for only the last tokens of them are asked for. Health is asked for every POLL_S. `health_ms`: the slowest
answer of all; `health_alone_ms`: before. `gap_ratio`: between two messages of a stream, at the median, beside what it
is alone, in the worst of the cases; `long_texts` tells of each, and of the 99th of a hundred. Fifty texts of 15 MB at
once are beyond what the bounds hold for: gRPC copies each of them in the event loop, several in one turn of it.

*Requests that are refused*: each kind of bad field, one after another. `refused_ms`: the slowest.

Exits with 1 where a figure passes one of BOUNDS.
"""

import argparse
import asyncio
import multiprocessing
import sys
import time
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from statistics import median, quantiles
from typing import Any

import grpc.aio
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.bounds import tell
from benchmarks.capacity.latency import StepLatency
from benchmarks.capacity.observed import Room, System
from paged.cli.processes import while_alive
from paged.client import Client, generate_request
from paged.v1 import inference_pb2_grpc
from scheduler_svc.api.health import LIVE

STEP_MS = 10
STEP, ROOM = StepLatency(STEP_MS * 1e3), Room(max_rows=64, num_blocks=16_384, tokens_per_step=512)
MAX_MODEL_LEN, MAX_UNREAD_BYTES = 6000, 4 << 20
NUM_STREAMS, NUM_STOPPED, STOPPED_TOKENS = 10, 20, 5000
POLL_S, SETTLE_S = 0.05, 1.0
BEYOND = "fifty texts of 15 MB"
TEXTS: dict[str, tuple[int, str, int, int | None]] = {  # how many, of what, how long, tokens that are kept
    "a text of 20 MB": (1, "a", 20_000_000, None),
    "fifty texts of 20 MB": (50, "a", 20_000_000, None),
    "a text of 15 MB": (1, "a", 15_000_000, None),
    "a million letters": (1, "a", 1_000_000, 8),
    "a million emoji": (1, "\U0001f469", 1_000_000, 8),
    BEYOND: (50, "a", 15_000_000, None),
}
BAD: list[dict[str, Any]] = [
    {"prompt": []},
    {"prompt": [1] * 1_200_000},
    {"prompt": [1 << 31]},
    {"prompt": "x", "model": "another"},
    {"prompt": "x", "max_tokens": 0},
    {"prompt": "x", "n": 0},
    {"prompt": "x", "n": 1_000_000},
    {"prompt": "x", "stop": ["x"] * 5000},
    {"prompt": "x", "stop": [""]},
    {"prompt": "x", "stop_token_ids": [7] * 5000},
    {"prompt": "x", "logit_bias": {1 << 31: 1.0}},
    {"prompt": "x", "temperature": float("nan")},
]
REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
BOUNDS = {"rate_lost": 1.1, "health_ms": 200.0, "gap_ratio": 2.0, "refused_ms": 100.0, "not_as_expected": 0}


class Streams:
    """So many at once, each followed by another, all read; and what their readers saw."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._messages: list[tuple[float, float, int]] = []  # when; since the one before; its tokens

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            reading = [tasks.create_task(self._read(number)) for number in range(NUM_STREAMS)]
            await asyncio.sleep(SETTLE_S)
            yield
            for task in reading:
                task.cancel()

    async def _read(self, number: int) -> None:
        while True:
            last = None
            prompt = [300 + number] * 8
            async for message in self._client.generate(prompt, max_tokens=3000, temperature=0, ignore_eos=True):
                now = time.perf_counter()
                if last is not None:
                    self._messages.append((now, now - last, len(message.token_ids)))
                last = now

    def rate(self, begin: float) -> float:
        """Tokens a second since then."""
        tokens = sum(count for at, _, count in self._messages if at > begin)
        return tokens / (time.perf_counter() - begin)

    def gaps_ms(self, begin: float) -> tuple[float, float]:
        """Between messages since then, at the median and at the 99th of a hundred."""
        gaps = [1e3 * gap for at, gap, _ in self._messages if at > begin]
        return median(gaps), quantiles(gaps, n=100)[-1]


def send(address: str, kind: str) -> int:
    """In a process of its own; returns how many calls did not end as they should."""
    count, letter, length, kept = TEXTS[kind]
    options: Any = {} if kept is None else {"truncate_prompt_tokens": kept}

    async def all_at_once() -> int:
        async with Client(address) as client:
            text = letter * length
            asked = [client.complete(text, max_tokens=1, **options) for _ in range(count)]
            ends = await asyncio.gather(*asked, return_exceptions=True)
        return sum(isinstance(end, Exception) is (kept is not None) for end in ends)

    return uvloop.run(all_at_once())


async def slowest_health_ms(health: Any, until: Awaitable[Any]) -> float:
    """Of the answers until that has ended."""
    slowest, ended = 0.0, asyncio.ensure_future(until)
    while not ended.done():
        begin = time.perf_counter()
        await health.Check(health_pb2.HealthCheckRequest(service=LIVE), timeout=30)
        slowest = max(slowest, time.perf_counter() - begin)
        await asyncio.wait([ended], timeout=POLL_S)
    await ended
    return 1e3 * slowest


async def long_texts(address: str, streams: Streams, health: Any, alone_s: float) -> dict[str, Any]:
    begin = time.perf_counter()
    found: dict[str, Any] = {"health_alone_ms": await slowest_health_ms(health, asyncio.sleep(alone_s))}
    alone = streams.gaps_ms(begin)
    cases: dict[str, dict[str, float]] = {}
    wrong = 0
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as sender:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(sender, time.monotonic)  # it is there, and has loaded what it needs
        for kind in TEXTS:
            begin = time.perf_counter()
            sending = loop.run_in_executor(sender, send, address, kind)
            health_ms = await slowest_health_ms(health, asyncio.gather(sending, asyncio.sleep(SETTLE_S)))
            gap, late = (during / before for during, before in zip(streams.gaps_ms(begin), alone, strict=True))
            cases[kind] = {"health_ms": round(health_ms, 1), "gap_ratio": round(gap, 2), "p99_ratio": round(late, 2)}
            wrong += sending.result()
    judged = [case for kind, case in cases.items() if kind != BEYOND]
    found |= {name: max(case[name] for case in judged) for name in ("health_ms", "gap_ratio")}
    return found | {"gaps_alone_ms": [round(gap, 1) for gap in alone], "long_texts": cases, "not_as_expected": wrong}


async def stopped_readers(address: str, streams: Streams, alone_s: float, beside_s: float) -> float:
    begin = time.perf_counter()
    await asyncio.sleep(alone_s)
    alone = streams.rate(begin)
    # So that the network does not hold the whole of an answer that nobody reads.
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 32 * 1024)]
    async with grpc.aio.insecure_channel(address, options=narrow) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        request = generate_request([300] * 8, max_tokens=STOPPED_TOKENS, ignore_eos=True, logprobs=20)
        stopped = [stub.Generate(request) for _ in range(NUM_STOPPED)]
        for call in stopped:
            await call.read()
        begin = time.perf_counter()
        await asyncio.sleep(beside_s)
        beside = streams.rate(begin)
        for call in stopped:
            call.cancel()
    return alone / beside


async def refusals(stub: Any, rounds: int) -> tuple[float, int]:
    """The slowest, in milliseconds; and how many were none."""
    slowest, wrong = 0.0, 0
    for request in [generate_request(**options) for options in BAD] * rounds:
        begin = time.perf_counter()
        try:
            await stub.Generate(request).read()
            wrong += 1
        except grpc.aio.AioRpcError as error:
            wrong += error.code() not in REFUSALS
            slowest = max(slowest, time.perf_counter() - begin)
    return 1e3 * slowest, wrong


async def figures(system: System, alone_s: float, beside_s: float) -> dict[str, Any]:
    (address,) = system.addresses
    async with Client(address) as client, grpc.aio.insecure_channel(address) as channel:
        streams = Streams(client)
        async with streams.reading():
            found = await long_texts(address, streams, health_pb2_grpc.HealthStub(channel), alone_s)
            refused_ms, wrong = await refusals(inference_pb2_grpc.InferenceServiceStub(channel), rounds=5)
            rate_lost = await stopped_readers(address, streams, alone_s, beside_s)
    found["not_as_expected"] += wrong
    rounded = {name: round(value, 1) if isinstance(value, float) else value for name, value in found.items()}
    return rounded | {"refused_ms": round(refused_ms, 1), "rate_lost": round(rate_lost, 3)}


async def measure(alone_s: float, beside_s: float) -> dict[str, Any]:
    scheduler = ["--max-unread-bytes", str(MAX_UNREAD_BYTES)]
    executor = ["--simulate-max-model-len", str(MAX_MODEL_LEN)]
    async with System.started(STEP, ROOM, scheduler_flags=scheduler, executor_flags=executor) as system:
        return await while_alive(figures(system, alone_s, beside_s), system.executor, *system.schedulers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--alone-s", type=float, default=10.0, help="seconds of the streams alone (%(default)g)")
    parser.add_argument("--beside-s", type=float, default=60.0, help="beside who does not read (%(default)g)")
    arguments = parser.parse_args()
    found = uvloop.run(measure(arguments.alone_s, arguments.beside_s))
    sys.exit(tell(found, BOUNDS, as_json=arguments.json))


if __name__ == "__main__":
    main()
