"""Many generations in one call, through a whole system: each as exact, as bounded and as free as if it had its own."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator

import grpc
import grpc.aio
import pytest

from paged.client import (
    Client,
    DeadlineExceededError,
    DuplicateRequestError,
    InvalidRequestError,
    ResourceExhaustedError,
)
from paged.v1 import inference_pb2
from tests.processes import cleaned_up
from tests.system.conftest import System
from tests.system.requests import answer, answers, idle_load, mixed_calls, ready
from tests.system.shared_calls import ENDLESS, SOON_S, Stub, begun, generate_many, read_to_the_end, saying


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a system that all tests have which leave it as it is."""
    with cleaned_up([]) as services:
        yield System(tmp_path_factory.mktemp("system"), services).start().address


@pytest.fixture
async def own(running: str) -> AsyncIterator[Client]:
    """A client whose answers have calls of their own."""
    async with Client(running) as client:
        await ready(client)
        yield client


@pytest.fixture
async def shared(running: str, own: Client) -> AsyncIterator[Client]:
    async with Client(running, share_calls=True) as client:
        yield client


@pytest.fixture
async def stub(running: str, own: Client) -> AsyncIterator[Stub]:
    async with generate_many(running) as many:
        yield many


async def test_each_answer_is_the_one_that_a_call_of_its_own_gets(shared: Client) -> None:
    calls = mixed_calls(120, random.Random(0))
    before = await shared.load()
    found = await asyncio.gather(
        *(answer(shared, call, cancel_after=9 if i % 5 == 0 else None) for i, call in enumerate(calls))
    )
    for i, (ids, call) in enumerate(zip(found, calls, strict=True)):
        expected = call.expected()
        assert ids == (expected if i % 5 else expected[: len(ids)])
    load = await idle_load(shared)
    assert (load.used_blocks, load.unread_bytes) == (0, 0)
    tokens, messages = (getattr(load, name) - getattr(before, name) for name in ("streamed_tokens", "stream_messages"))
    assert tokens > 2 * messages  # they did share


async def test_samples_beams_and_the_best_of_several_are_told_as_ever(shared: Client, own: Client) -> None:
    call = mixed_calls(1, random.Random(1))[0]
    several = type(call)(call.prompt, 30, 1.0, 7, "", num_samples=3)
    ways = [
        {"beam": inference_pb2.BeamSearch(width=3), "n": 2, "max_tokens": 8},
        {"best_of": 3, "n": 2, "max_tokens": 8, "seed": 3},
        {"echo": True, "prompt_logprobs": 2, "logprobs": 2, "max_tokens": 8, "seed": 4},
    ]
    assert await answers(shared, several) == [several.expected(index=index) for index in range(3)]
    for way in ways:
        said = []
        for client in (shared, own):
            whole, texts = inference_pb2.GenerateResponse(), {}
            async for message in client.generate([300] * 40, request_id="r", **way):
                message.ClearField("usage")  # it tells of cached tokens
                texts[message.index] = texts.get(message.index, "") + message.text
                message.text = ""
                whole.MergeFrom(message)
            assert whole.token_ids
            said.append((whole, texts))
        assert said[0] == said[1]


async def test_a_whole_answer_comes_in_one_update(stub: Stub) -> None:
    call = stub()
    for number in range(3):
        request = begun(number, max_tokens=40, ignore_eos=True, n=2)
        request.actions[0].generate.stream = False
        await call.write(request)
    await call.done_writing()
    updates = await read_to_the_end(call)
    for number in range(3):
        first, last = updates[number]
        assert [len(update.response.token_ids) for update in (first, last)] == [40, 40]
        assert (first.HasField("end"), last.HasField("end"), last.end.code) == (False, True, 0)
    assert await call.code() == grpc.StatusCode.OK


async def test_the_request_id_is_told_once_and_the_end_with_the_last_tokens(stub: Stub) -> None:
    call = stub()
    await call.write(begun(5, max_tokens=300, ignore_eos=True, request_id="mine"))
    await call.done_writing()
    updates = (await read_to_the_end(call))[5]
    assert [update.response.request_id for update in updates] == ["mine"] + [""] * (len(updates) - 1)
    assert [update.HasField("end") for update in updates] == [False] * (len(updates) - 1) + [True]
    assert updates[-1].response.HasField("finish")


async def test_plain_updates_say_in_columns_what_others_hear_one_by_one(stub: Stub) -> None:
    calls = mixed_calls(24, random.Random(2))
    heard: list[dict[int, tuple[str, list[int]]]] = []
    num_plain: list[int] = []
    for takes_plain in (False, True):
        many, said, in_columns = stub(), {number: ("", list[int]()) for number in range(len(calls))}, 0
        for number, call in enumerate(calls):
            request = begun(number, prompt=call.prompt, max_tokens=call.max_tokens, ignore_eos=True)
            request.takes_plain = takes_plain
            await many.write(request)
        await many.done_writing()
        async with asyncio.timeout(SOON_S):
            async for message in many:
                plain, begin = message.plain, 0
                news = [
                    (update.number, update.response.text, list(update.response.token_ids)) for update in message.updates
                ]
                for number, text, num_tokens in zip(plain.numbers, plain.texts, plain.num_tokens, strict=True):
                    news.append((number, text, list(plain.token_ids[begin : begin + num_tokens])))
                    begin += num_tokens
                assert begin == len(plain.token_ids)
                assert len({number for number, *_ in news}) == len(news)
                in_columns += len(plain.numbers)
                for number, text, token_ids in news:
                    said[number] = (said[number][0] + text, said[number][1] + token_ids)
        heard.append(said)
        num_plain.append(in_columns)
    assert heard[0] == heard[1]
    assert all(token_ids for _, token_ids in heard[1].values())
    assert num_plain[0] == 0 < num_plain[1]


async def test_what_is_wrong_with_one_request_is_told_of_that_one(stub: Stub) -> None:
    call = stub()
    await call.write(begun(1, max_tokens=200, ignore_eos=True, request_id="a"))
    await call.write(begun(2, top_p=7.0))
    await call.write(begun(3, max_tokens=5, request_id="a"))
    await call.write(begun(4, model="nobody's"))
    await call.done_writing()
    updates = await read_to_the_end(call)
    codes = {number: updates[number][-1].end.code for number in updates}
    assert codes == {1: 0, 2: 3, 3: 6, 4: 5}
    assert "top_p" in updates[2][0].end.message
    assert sum(len(update.response.token_ids) for update in updates[1]) == 200


@pytest.mark.parametrize(
    ("requests", "field"),
    [
        ([begun(1), begun(1)], "number"),
        ([begun(2), begun(1)], "number"),
        ([saying(*begun(1).actions, *begun(2).actions, *begun(2).actions)], r"actions\[2\]\.number"),
        ([saying(inference_pb2.GenerationAction(number=1))], r"actions\[0\]\.action"),
    ],
)
async def test_a_client_that_has_lost_count_loses_the_call(
    stub: Stub, requests: list[inference_pb2.GenerateManyRequest], field: str
) -> None:
    call = stub()
    for request in requests:
        await call.write(request)
    with pytest.raises(grpc.aio.AioRpcError, match=field) as caught:
        await read_to_the_end(call)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_the_clients_errors_are_those_of_a_call_of_its_own(shared: Client) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await anext(shared.generate([300] * 8, top_p=7.0))
    assert [violation.field for violation in caught.value.violations] == ["sampling.top_p"]
    running = shared.generate([300] * 8, request_id="a", **ENDLESS)
    await anext(running)
    with pytest.raises(DuplicateRequestError):
        await anext(shared.generate([300] * 8, request_id="a"))
    with pytest.raises(DeadlineExceededError):
        [_ async for _ in shared.generate([300] * 8, timeout_s=0.3, max_tokens=4000, ignore_eos=True)]
    await running.aclose()
    assert (await idle_load(shared)).used_blocks == 0


async def test_a_request_that_is_too_large_ends_nothing_but_itself(shared: Client) -> None:
    running = [shared.generate([300] * 8, max_tokens=300, ignore_eos=True) for _ in range(8)]
    for generation in running:
        await anext(generation)
    with pytest.raises(ResourceExhaustedError, match="larger than max"):
        await anext(shared.generate("x" * 17_000_000))
    for generation in running:
        assert [message async for message in generation][-1].finish.reason == inference_pb2.FINISH_REASON_LENGTH


async def test_cancelling_frees_all_at_once_and_nothing_more_is_said(stub: Stub, own: Client) -> None:
    call = stub()
    await call.write(begun(1, **ENDLESS))
    async for message in call:
        if any(update.response.token_ids for update in message.updates):
            break
    cancelled = inference_pb2.CancelGeneration()
    # One that goes on, one that is over before it has begun, and nobody's.
    cancels = [inference_pb2.GenerationAction(number=number, cancel=cancelled) for number in (1, 2, 99)]
    await call.write(saying(*begun(2, **ENDLESS).actions, *cancels))
    assert (await idle_load(own)).used_blocks == 0
    await call.write(begun(3, max_tokens=3, ignore_eos=True))
    await call.done_writing()
    updates = await read_to_the_end(call)
    assert not any(update.HasField("end") for number in (1, 2) for update in updates.get(number, []))
    assert updates[3][-1].end.code == 0


async def test_a_caller_who_goes_away_leaves_nothing_running(stub: Stub, own: Client) -> None:
    call = stub()
    for number in range(8):
        await call.write(begun(number, **ENDLESS))
    await anext(aiter(call))
    call.cancel()
    assert (await idle_load(own)).used_blocks == 0


async def test_in_the_client_who_does_not_read_loses_its_own_answer(
    shared: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paged.many.MAX_UNREAD_BYTES", 4096)
    unread = shared.generate([300] * 8, **ENDLESS)
    await anext(unread)
    for call in mixed_calls(20, random.Random(0)):
        assert await answer(shared, call) == call.expected()
    assert (await idle_load(shared)).used_blocks == 0
    with pytest.raises(ResourceExhaustedError, match="were not read"):
        [_ async for _ in unread]
