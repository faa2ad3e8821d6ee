"""Load on schedulers: streams that are always open, or requests that come at random, read as their messages come."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc.aio

from paged.errors import PagedClientError, translated
from paged.load.lengths import Mix, mixed_lengths
from paged.load.seen import Seen
from paged.many import Many, NotTaken, Plain
from paged.v1 import inference_pb2

METHOD = "/paged.v1.InferenceService/Generate"
METHOD_OF_MANY = "/paged.v1.InferenceService/GenerateMany"
IDS = (300, 30_000)  # of which prompts are made
LONGEST = 4096
ERROR_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Load:
    """`streams` requests at once, each followed by another, unless `once`; or, where there is a `rate`, requests that
    come at random, so many a second, whatever becomes of those before, with at most `streams` of them open.

    With `share_calls` the answers have a few calls together.

    Lengths in tokens are of a `mix` (prompt and output together have at most `longest`), or drawn
    evenly from their ranges. The first outputs of streams are from 1 on, so that they do not end together (unless
    `once`). Prompts are of token ids from the range `ids`."""

    target: str
    streams: int
    prompt_tokens: tuple[int, int] = (32, 96)
    output_tokens: tuple[int, int] = (256, 768)
    mix: Mix | None = None
    longest: int = LONGEST
    ids: tuple[int, int] = IDS
    rate: float | None = None
    model: str = ""
    once: bool = False
    share_calls: bool = False
    seed: int = 0


class LoadGenerator:
    """Asks from when it is entered until it is closed, on a channel that is the caller's; `metadata` goes with each
    call."""

    def __init__(self, load: Load, channel: grpc.aio.Channel, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self._load = load
        self._metadata = metadata
        # Messages are read as bytes and parsed here: a stub does more than there is time for.
        self._generate: Any = channel.unary_stream(METHOD)
        self._many = Many(
            channel.stream_stream(
                METHOD_OF_MANY,
                request_serializer=inference_pb2.GenerateManyRequest.SerializeToString,
                response_deserializer=inference_pb2.GenerateManyResponse.FromString,
            ),
            channel,
            load.target,
        )
        self._cold = set(range(load.streams)) if load.rate is None else set()
        self._warm = asyncio.Event()
        self.seen: Seen | None = None  # of the window that goes on
        self.began = 0.0  # in seconds of time.perf_counter()
        self._sent: set[asyncio.Task[bool]] = set()  # and not yet ended
        self._asking: list[asyncio.Task[None]] = []
        self.last_error: PagedClientError | None = None

    async def __aenter__(self) -> Self:
        if self._load.share_calls:
            await self._many.settled(self._metadata)
        if self._load.rate is None:
            self._asking = [asyncio.create_task(self._stream(number)) for number in range(self._load.streams)]
        else:
            self._asking = [asyncio.create_task(self._arrivals(self._load.rate))]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.ask_no_more()
        for task in self._sent:
            task.cancel()
        await asyncio.gather(*self._asking, *self._sent, return_exceptions=True)
        await self._many.close()

    async def warmed_up(self) -> None:
        """Until every stream has had a token, or an error."""
        if self._cold:
            await self._warm.wait()

    async def finished(self) -> None:
        """Until all streams of a load that is `once` have ended."""
        await asyncio.gather(*self._asking)

    def begin(self) -> None:
        """A window begins."""
        self.seen = Seen()
        self.began = time.perf_counter()

    def end(self) -> Seen:
        """What was seen in the window, which ends. Requests that were sent in it go on to be counted in it."""
        if self.seen is None:
            raise RuntimeError("end() comes after begin()")
        seen, self.seen = self.seen, None
        seen.seconds = time.perf_counter() - self.began
        return seen

    def ask_no_more(self) -> None:
        """What was sent goes on."""
        for task in self._asking:
            task.cancel()

    async def drained(self, timeout_s: float) -> None:
        """Waits for what was sent to end, so long at most. Nothing is asked any more."""
        self.ask_no_more()
        await asyncio.gather(*self._asking, return_exceptions=True)
        if self._sent:
            await asyncio.wait(self._sent, timeout=timeout_s)

    async def _arrivals(self, rate: float) -> None:
        chance, at = random.Random(self._load.seed), time.perf_counter()
        while True:
            at += chance.expovariate(rate)
            await asyncio.sleep(max(at - time.perf_counter(), 0))
            if len(self._sent) < self._load.streams:
                self._send(0, self._request(chance, *self._load.output_tokens), at)
            elif self.seen is not None:
                self.seen.unsent += 1

    async def _stream(self, number: int) -> None:
        chance = random.Random(self._load.seed * 1_000_003 + number)
        shortest, longest = self._load.output_tokens
        request = self._request(chance, shortest if self._load.once else 1, longest)
        while True:
            answer = self._send(number, request, time.perf_counter())
            await asyncio.shield(answer)  # whoever asks no more lets it go on
            if answer.result():
                await asyncio.sleep(ERROR_PAUSE_S)
            if self._load.once:
                return
            request = self._request(chance, shortest, longest)

    def _send(self, number: int, request: bytes, due: float) -> asyncio.Task[bool]:
        task = asyncio.create_task(self._counted(number, request, due))
        self._sent.add(task)
        task.add_done_callback(self._sent.discard)
        return task

    async def _counted(self, number: int, request: bytes, due: float) -> bool:
        """Whether it failed."""
        sent_in = self.seen
        if sent_in is not None:
            sent_in.sent += 1
            sent_in.unfinished += 1
        answer = _Answer(self, number, due, sent_in)
        try:
            if not (self._load.share_calls and await self._read_shared(request, answer)):
                await self._read(request, answer)
        except PagedClientError as failure:
            self.last_error = failure
            if sent_in is not None:
                sent_in.unfinished -= 1
                _count(sent_in.errors, failure.code.name)
            elif self.seen is not None:
                _count(self.seen.earlier_errors, failure.code.name)
            self.note_warm(number)
            return True
        answer.finish()
        return False

    async def _read(self, request: bytes, answer: "_Answer") -> None:
        """In a call of its own."""
        call = self._generate(request, metadata=self._metadata)
        try:
            while (data := await call.read()) is not grpc.aio.EOF:
                answer.count(len(inference_pb2.GenerateResponse.FromString(data).token_ids))
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            raise await translated(call, error) from None
        finally:
            call.cancel()

    async def _read_shared(self, request: bytes, answer: "_Answer") -> bool:
        """Whether there is a call with others that takes it. What comes is counted without waking anybody, which would
        cost as much as all else that is done with it."""

        def count(news: inference_pb2.GenerateResponse | Plain) -> None:
            answer.count(len(news[1] if isinstance(news, tuple) else news.token_ids))

        try:
            parsed = inference_pb2.GenerateRequest.FromString(request)
            generation = self._many.begin(parsed, None, self._metadata, count)
            try:
                async for _ in generation:
                    pass
            finally:
                generation.close()
        except NotTaken:
            return False
        return True

    def note_warm(self, number: int) -> None:
        self._cold.discard(number)
        if not self._cold:
            self._warm.set()

    def _request(self, chance: random.Random, shortest: int, longest: int) -> bytes:
        if self._load.mix is not None:
            num_prompt, num_output = mixed_lengths(self._load.mix, chance, self._load.longest)
        else:
            num_prompt, num_output = chance.randint(*self._load.prompt_tokens), chance.randint(shortest, longest)
        return inference_pb2.GenerateRequest(
            model=self._load.model,
            token_ids=inference_pb2.TokenIds(ids=chance.choices(range(*self._load.ids), k=num_prompt)),
            sampling=inference_pb2.SamplingParams(temperature=0),
            stop=inference_pb2.StopConditions(max_tokens=num_output, ignore_eos=True),
        ).SerializeToString()


class _Answer:
    """What is seen of one request, which was `sent_in` a window, or in none."""

    __slots__ = ("_due", "_first", "_generator", "_last", "_num_after_first", "_number", "_sent_in")

    def __init__(self, generator: LoadGenerator, number: int, due: float, sent_in: Seen | None) -> None:
        self._generator = generator
        self._number = number
        self._due = due
        self._sent_in = sent_in
        self._first = self._last = 0.0
        self._num_after_first = 0

    def count(self, num_tokens: int) -> None:
        """Of a message that has come."""
        if not num_tokens:
            return
        now, generator = time.perf_counter(), self._generator
        seen = generator.seen
        if seen is not None:
            seen.count_tokens(num_tokens, int(now - generator.began))
            if self._first:
                seen.gaps_s.append(now - self._last)
        if self._first:
            self._num_after_first += num_tokens
        else:
            self._first = now
            generator.note_warm(self._number)
            if self._sent_in is not None:
                self._sent_in.ttft_s.append(now - self._due)
        self._last = now

    def finish(self) -> None:
        """It has come to its end."""
        seen = self._sent_in
        if seen is not None:
            seen.finished += 1
            seen.unfinished -= 1
            seen.latency_s.append(time.perf_counter() - self._due)
            if self._num_after_first:
                seen.per_token_s.append((self._last - self._first) / self._num_after_first)


def _count(counts: dict[str, int], what: str) -> None:
    counts[what] = counts.get(what, 0) + 1
