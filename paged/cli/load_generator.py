"""Load on schedulers: streams that are always open, read as they come, and what their readers have seen.

A process of its own (`python -m paged.cli.load_generator`), so that reading does not take the time of whoever measures:
it is given a line of JSON on stdin (the fields of `Load`), says "warm" on stdout once every stream has had a token,
counts from the line "begin" on, and at the line "end" says what it has seen, as JSON (the fields of `Seen`).
"""

import asyncio
import json
import random
import sys
import time
from array import array
from collections import Counter
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any, Self

import grpc.aio

from paged.channel import channel_options
from paged.v1 import inference_pb2

METHOD = "/paged.v1.InferenceService/Generate"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
IDS = (300, 30_000)  # of which prompts are made
ERROR_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Load:
    """`streams` requests at once, each followed by another, unless `once`. Lengths in tokens are drawn evenly from
    their ranges; the first outputs from 1 on, so that they do not end together (unless `once`)."""

    target: str
    streams: int
    prompt_tokens: tuple[int, int] = (32, 96)
    output_tokens: tuple[int, int] = (256, 768)
    once: bool = False
    seed: int = 0


@dataclass(slots=True)
class Seen:
    """From "begin" to "end". `ttft_s`: from sending a request to its first token, of those sent in that time.
    `gaps_s`: between a stream's messages with tokens, each of which may bring several. `errors`: counts of codes."""

    seconds: float = 0.0
    tokens: int = 0
    messages: int = 0
    finished: int = 0
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)


class LoadGenerator:
    """Opens its streams at once and keeps them open until it is closed."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._channel = grpc.aio.insecure_channel(load.target, options=channel_options(MAX_MESSAGE_BYTES))
        # Messages are read as bytes and parsed here: a stub does more than there is time for.
        self._generate: Any = self._channel.unary_stream(METHOD)
        self._cold = set(range(load.streams))
        self._warm = asyncio.Event()
        self._began: float | None = None
        self._forget()

    async def __aenter__(self) -> Self:
        self._streams = [asyncio.create_task(self._stream(number)) for number in range(self._load.streams)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for stream in self._streams:
            stream.cancel()
        await asyncio.gather(*self._streams, return_exceptions=True)
        await self._channel.close(None)

    async def warmed_up(self) -> None:
        """Until every stream has had a token, or an error."""
        await self._warm.wait()

    async def finished(self) -> None:
        """Until all streams of a load that is `once` have ended."""
        await asyncio.gather(*self._streams)

    def begin(self) -> None:
        """Count anew from now on."""
        self._forget()
        self._began = time.perf_counter()

    def end(self) -> Seen:
        """What was seen since `begin`."""
        if self._began is None:
            raise RuntimeError("end() comes after begin()")
        seconds, self._began = time.perf_counter() - self._began, None
        return Seen(
            seconds=seconds,
            tokens=self._num_tokens,
            messages=self._num_messages,
            finished=self._num_finished,
            ttft_s=list(self._ttft_s),
            gaps_s=list(self._gaps_s),
            errors=dict(self._errors),
        )

    def _forget(self) -> None:
        self._num_tokens = self._num_messages = self._num_finished = 0
        self._ttft_s, self._gaps_s = array("d"), array("d")
        self._errors: Counter[str] = Counter()

    async def _stream(self, number: int) -> None:
        drawn = random.Random(self._load.seed * 1_000_003 + number)
        shortest, longest = self._load.output_tokens
        request = self._request(drawn, shortest if self._load.once else 1, longest)
        while True:
            try:
                await self._answer(number, request)
                self._num_finished += 1
            except grpc.aio.AioRpcError as error:
                self._errors[error.code().name] += 1
                self._note_warm(number)
                await asyncio.sleep(ERROR_PAUSE_S)
            if self._load.once:
                return
            request = self._request(drawn, shortest, longest)

    async def _answer(self, number: int, request: bytes) -> None:
        sent = time.perf_counter()
        last: float | None = None
        call = self._generate(request)
        while (data := await call.read()) is not grpc.aio.EOF:
            num_tokens = len(inference_pb2.GenerateResponse.FromString(data).token_ids)
            if not num_tokens:
                continue
            now = time.perf_counter()
            if last is not None:
                self._gaps_s.append(now - last)
            elif self._began is None or sent >= self._began:
                self._ttft_s.append(now - sent)
            if last is None:
                self._note_warm(number)
            last = now
            self._num_tokens += num_tokens
            self._num_messages += 1

    def _note_warm(self, number: int) -> None:
        self._cold.discard(number)
        if not self._cold:
            self._warm.set()

    def _request(self, drawn: random.Random, shortest: int, longest: int) -> bytes:
        num_prompt, num_output = drawn.randint(*self._load.prompt_tokens), drawn.randint(shortest, longest)
        return inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=drawn.choices(range(*IDS), k=num_prompt)),
            sampling=inference_pb2.SamplingParams(temperature=0),
            stop=inference_pb2.StopConditions(max_tokens=num_output, ignore_eos=True),
        ).SerializeToString()


async def _serve() -> None:
    reader = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    load = Load(**json.loads(await reader.readline()))
    async with LoadGenerator(load) as generator:
        await generator.warmed_up()
        print("warm", flush=True)
        await _line(reader, "begin")
        generator.begin()
        if load.once:
            await generator.finished()
        await _line(reader, "end")
        print(json.dumps(asdict(generator.end())), flush=True)


async def _line(reader: asyncio.StreamReader, due: str) -> None:
    if (line := (await reader.readline()).decode().strip()) != due:
        raise SystemExit(f"{line!r} came where {due!r} was due")


def main() -> None:
    if find_spec("uvloop") is not None:  # a third more messages; not a dependency of clients
        import uvloop

        uvloop.run(_serve())
    else:
        asyncio.run(_serve())


if __name__ == "__main__":
    main()
