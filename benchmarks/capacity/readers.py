"""Clients in a process of their own: requests come at random times, and every message of theirs is read at once.

Run as `python -m benchmarks.capacity.readers`, with the fields of `Load` as JSON on stdin. It says "begin" when its
window begins, and when that ends what was seen in it, as JSON (the fields of `Seen`).
"""

import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import cycle
from typing import Any

import grpc.aio
import uvloop

from paged.v1 import inference_pb2 as pb

METHOD = "/paged.v1.InferenceService/Generate"
IDS = range(300, 30_000)


@dataclass(frozen=True, slots=True)
class Load:
    """`rate` requests a second, each independent of the others, over all addresses in turn; tokens of prompt and output
    are `lengths`, again and again. The window begins after `settle_s`."""

    addresses: list[str]
    rate: float
    lengths: list[tuple[int, int]]
    settle_s: float
    seconds: float
    seed: int = 0


@dataclass(slots=True)
class Seen:
    """In the window. `ttft_s` of requests that came in it (so far as they have waited, without a token); `gaps_s`
    between a stream's messages. `stream_s` and `stream_tokens`: from first to last token of all streams, and tokens
    that came after their first."""

    requests: int = 0
    prompt_tokens: int = 0
    messages: int = 0
    tokens: int = 0
    open_streams: int = 0  # at its end
    seconds: float = 0.0
    stream_s: float = 0.0
    stream_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


class Readers:
    def __init__(self, load: Load) -> None:
        self._load = load
        self._began: float | None = None
        self._open: dict[asyncio.Task[None], float] = {}  # arrival of those without a token; -1 once they have one
        self.seen = Seen()

    async def run(self) -> Seen:
        channels = [grpc.aio.insecure_channel(address) for address in self._load.addresses]
        calls: list[Any] = [
            channel.unary_stream(METHOD, response_deserializer=pb.GenerateResponse.FromString) for channel in channels
        ]
        asking = asyncio.create_task(self._ask(calls))
        await asyncio.sleep(self._load.settle_s)
        self.seen, self._began = Seen(), time.perf_counter()
        print("begin", flush=True)
        await asyncio.sleep(self._load.seconds)
        asking.cancel()
        now = time.perf_counter()
        self.seen.seconds = now - self._began
        self.seen.open_streams = len(self._open)
        self.seen.ttft_s += [now - came for came in self._open.values() if came >= self._began]
        return self.seen

    async def _ask(self, calls: list[Any]) -> None:
        chance = random.Random(self._load.seed)
        lengths, turns = cycle(self._load.lengths), cycle(calls)
        at = time.perf_counter()
        while True:
            at += chance.expovariate(self._load.rate)
            await asyncio.sleep(max(at - time.perf_counter(), 0))
            num_prompt, num_output = next(lengths)
            request = pb.GenerateRequest(
                token_ids=pb.TokenIds(ids=chance.choices(IDS, k=num_prompt)),
                sampling=pb.SamplingParams(temperature=0),
                stop=pb.StopConditions(max_tokens=num_output, ignore_eos=True),
            )
            self.seen.requests += 1
            self.seen.prompt_tokens += num_prompt
            task = asyncio.create_task(self._read(next(turns)(request.SerializeToString()), at))
            self._open[task] = at
            task.add_done_callback(self._open.pop)

    async def _read(self, call: Any, came: float) -> None:
        task = asyncio.current_task()
        assert task is not None
        last: float | None = None
        try:
            async for message in call:
                if not (num_tokens := len(message.token_ids)):
                    continue
                now, seen = time.perf_counter(), self.seen
                seen.messages += 1
                seen.tokens += num_tokens
                if last is not None:
                    seen.gaps_s.append(now - last)
                    seen.stream_s += now - last
                    seen.stream_tokens += num_tokens
                else:
                    self._open[task] = -1.0
                    if self._began is not None and came >= self._began:
                        seen.ttft_s.append(now - came)
                last = now
        except grpc.aio.AioRpcError as error:
            self.seen.failed.append(error.code().name)


def main() -> None:
    print(json.dumps(asdict(uvloop.run(Readers(Load(**json.load(sys.stdin))).run()))), flush=True)


if __name__ == "__main__":
    main()
