"""Load on schedulers: streams that are always open, or requests that come at random, read as their messages come."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc.aio

from paged.errors import PagedClientError, translated
from paged.load.lengths import Mix, mixed_lengths
from paged.load.seen import Seen
from paged.many import Generation, Many, NotTaken
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
        self._seen: Seen | None = None
        self._began = 0.0
        self._sent: set[asyncio.Task[bool]] = set()  # and not yet ended
        self._asking: list[asyncio.Task[None]] = []
        self.last_error: PagedClientError | None = None

    async def __aenter__(self) -> Self:
        if self._load.share_calls:
            await self._many.settled()
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
        self._seen = Seen()
        self._began = time.perf_counter()

    def end(self) -> Seen:
        """What was seen in the window, which ends. Requests that were sent in it go on to be counted in it."""
        if self._seen is None:
            raise RuntimeError("end() comes after begin()")
        seen, self._seen = self._seen, None
        seen.seconds = time.perf_counter() - self._began
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
            elif self._seen is not None:
                self._seen.unsent += 1

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
        sent_in = self._seen
        if sent_in is not None:
            sent_in.sent += 1
            sent_in.unfinished += 1
        answer = self._shared(request) if self._load.share_calls else _Call(self._generate, request, self._metadata)
        try:
            await self._answer(number, answer, due, sent_in)
        except (PagedClientError, grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            failure = await answer.translated(error)
            if not isinstance(failure, PagedClientError):
                raise
            self.last_error = failure
            if sent_in is not None:
                sent_in.unfinished -= 1
                _count(sent_in.errors, failure.code.name)
            elif self._seen is not None:
                _count(self._seen.earlier_errors, failure.code.name)
            self._note_warm(number)
            return True
        finally:
            answer.close()
        return False

    def _shared(self, request: bytes) -> "_Call | _Shared":
        def own() -> _Call:
            return _Call(self._generate, request, self._metadata)

        parsed = inference_pb2.GenerateRequest.FromString(request)
        try:
            return _Shared(self._many.begin(parsed, None, self._metadata), own)
        except NotTaken:
            return own()

    async def _answer(self, number: int, answer: "_Call | _Shared", due: float, sent_in: Seen | None) -> None:
        first = last = 0.0
        num_after_first = 0
        while (num_tokens := await answer.num_tokens()) is not None:
            if not num_tokens:
                continue
            now, seen = time.perf_counter(), self._seen
            if seen is not None:
                seen.count_tokens(num_tokens, int(now - self._began))
                if first:
                    seen.gaps_s.append(now - last)
            if first:
                num_after_first += num_tokens
            else:
                first = now
                self._note_warm(number)
                if sent_in is not None:
                    sent_in.ttft_s.append(now - due)
            last = now
        if sent_in is not None:
            sent_in.finished += 1
            sent_in.unfinished -= 1
            sent_in.latency_s.append(time.perf_counter() - due)
            if num_after_first:
                sent_in.per_token_s.append((last - first) / num_after_first)

    def _note_warm(self, number: int) -> None:
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


class _Call:
    """An answer that has a call of its own."""

    def __init__(self, generate: Any, request: bytes, metadata: Sequence[tuple[str, str]]) -> None:
        self._call = generate(request, metadata=metadata)

    async def num_tokens(self) -> int | None:
        """Of the next message; None after the last."""
        data = await self._call.read()
        return None if data is grpc.aio.EOF else len(inference_pb2.GenerateResponse.FromString(data).token_ids)

    async def translated(self, error: BaseException) -> BaseException:
        return await translated(self._call, error)

    def close(self) -> None:
        self._call.cancel()


class _Shared:
    """The same face, of an answer in a call with others, or in `own` where no such call takes it."""

    def __init__(self, generation: Generation, own: Callable[[], _Call]) -> None:
        self._generation = generation
        self._own = own
        self._call: _Call | None = None

    async def num_tokens(self) -> int | None:
        if self._call is None:
            try:
                news = await self._generation.news()
                return len(news[1] if isinstance(news, tuple) else news.token_ids)
            except StopAsyncIteration:
                return None
            except NotTaken:
                self._call = self._own()
        return await self._call.num_tokens()

    async def translated(self, error: BaseException) -> BaseException:
        return error if self._call is None else await self._call.translated(error)

    def close(self) -> None:
        self._generation.close()
        if self._call is not None:
            self._call.close()


def _count(counts: dict[str, int], what: str) -> None:
    counts[what] = counts.get(what, 0) + 1
