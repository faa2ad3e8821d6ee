"""Generate, Tokenize and Detokenize over a real server and a real client."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from paged.channel import SCHEDULER_KEY
from paged.client import (
    Client,
    DeadlineExceededError,
    InvalidRequestError,
    UnavailableError,
    chat,
    generate_request,
)
from paged.v1 import inference_pb2, inference_pb2_grpc
from scheduler_svc.api.server import ApiServer
from scheduler_svc.errors import Unavailable
from scheduler_svc.requests import Delta, Finish, Usage
from scheduler_svc.settings import SchedulerSettings
from tests.api.scripted_engine import ANSWER, ScriptedEngine, forever

SOON_S = 20.0


async def collect(client: Client, prompt: Any = "Twice", **options: Any) -> list[inference_pb2.GenerateResponse]:
    return [message async for message in client.generate(prompt, **options)]


async def read_to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_stream_has_one_message_a_delta_and_ends_with_finish_and_usage(client: Client) -> None:
    messages = await collect(client, request_id="mine")
    assert [m.text for m in messages] == ["On", "", "ce", "!"]
    assert [list(m.token_ids) for m in messages] == [[11], [12], [13, 14], [2]]
    assert [m.HasField("finish") for m in messages] == [False, False, False, True]
    assert [m.HasField("usage") for m in messages] == [False, False, False, True]
    assert messages[-1].finish == inference_pb2.Finish(reason=inference_pb2.FINISH_REASON_STOP, token_id=2)
    assert messages[-1].usage == inference_pb2.Usage(prompt_tokens=5, completion_tokens=5, cached_tokens=4)
    assert {m.request_id for m in messages} == {"mine"}


async def test_one_message_says_what_the_stream_says(client: Client) -> None:
    streamed = await collect(client, logprobs=2)
    whole = await client.complete("Twice", logprobs=2)
    assert whole.text == "".join(m.text for m in streamed)
    assert whole.token_ids == [i for m in streamed for i in m.token_ids]
    assert whole.logprobs == [entry for m in streamed for entry in m.logprobs]
    assert (whole.finish, whole.usage) == (streamed[-1].finish, streamed[-1].usage)
    assert whole.logprobs[1] == inference_pb2.TokenLogprobs(
        logprob=-2.0, rank=7, top_ids=[3, 4], top_logprobs=[inference_pb2.TokenLogprobs(logprob=-0.1).logprob, -3.0]
    )


async def test_each_kind_of_prompt_reaches_the_engine_as_ids(client: Client, engine: ScriptedEngine) -> None:
    await collect(client, "AB")
    await collect(client, [7, 8, 9])
    await collect(client, chat({"role": "u", "content": "A"}))
    assert [r.prompt_ids for r in engine.submitted] == [[65, 66], [7, 8, 9], [60, 117, 62, 65]]


async def test_ids_of_prompts_take_no_object_each(client: Client, engine: ScriptedEngine) -> None:
    await collect(client, [400, 500])
    await collect(client, [500, 400])
    first, second = (request.prompt_ids for request in engine.submitted)
    assert first[0] is second[1]
    assert first[1] is second[0]


async def test_a_made_up_request_id_is_told(client: Client, engine: ScriptedEngine) -> None:
    messages = await collect(client)
    assert {m.request_id for m in messages} == {engine.submitted[0].request_id}


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("hi", {"temperature": float("nan")}, "sampling.temperature"),
        ("hi", {"max_tokens": 0}, "stop.max_tokens"),
        ("", {}, "text"),
        ("x" * 64, {}, "text"),
        ([], {}, "token_ids"),
        (chat(("user", "x" * 64)), {}, "chat"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_bad_field_is_named_and_nothing_is_queued(
    client: Client, engine: ScriptedEngine, prompt: Any, options: dict[str, Any], field: str, stream: bool
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await (collect(client, prompt, **options) if stream else client.complete(prompt, **options))
    assert [violation.field for violation in caught.value.violations] == [field]
    assert engine.submitted == []
    assert (await client.complete("hi")).text == "Once!"


@pytest.mark.parametrize(
    ("data", "problem"), [(b"\x1a\x02\xff\xfe", "UTF-8"), (b"\xff\xff\xff", "cannot be decoded")], ids=["text", "bytes"]
)
async def test_bytes_that_are_no_message_are_a_bad_request(address: str, data: bytes, problem: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = channel.unary_stream("/paged.v1.InferenceService/Generate")(data)
        assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert problem in await call.details()


async def test_without_a_model_calls_fail_fast(client: Client, engine: ScriptedEngine) -> None:
    engine.model_error = Unavailable("no executor has been attached yet")
    for call in (client.complete("hi"), client.tokenize("hi"), client.detokenize([1]), client.model()):
        with pytest.raises(UnavailableError, match="no executor"):
            await call


async def test_cancelling_a_call_closes_the_engines_answer(client: Client, engine: ScriptedEngine) -> None:
    engine.script = [ANSWER[0], forever]
    answer = client.generate("hi", request_id="cancelled")
    assert (await anext(answer)).text == "On"
    assert engine.live == {"cancelled"}
    await answer.aclose()
    assert await asyncio.wait_for(engine.ended.get(), SOON_S) == "cancelled"


async def test_cancelling_a_call_that_waits_for_its_first_token_closes_it(
    client: Client, engine: ScriptedEngine
) -> None:
    reached = asyncio.Event()

    async def reach() -> None:
        reached.set()

    engine.script = [reach, forever]
    task = asyncio.create_task(client.complete("hi"))
    await asyncio.wait_for(reached.wait(), SOON_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(engine.ended.get(), SOON_S)
    assert engine.live == set()


async def test_cancelling_a_stream_that_nobody_reads_closes_it(address: str, engine: ScriptedEngine) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        # Far more than the transport buffers: the server's write cannot end.
        engine.script = [Delta("x" * 65536)] * 1000
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Generate(generate_request("hi"))
        await call.read()
        call.cancel()
        await asyncio.wait_for(engine.ended.get(), SOON_S)


async def test_a_deadline_closes_the_engines_answer(client: Client, engine: ScriptedEngine) -> None:
    engine.script = [ANSWER[0], forever]
    with pytest.raises(DeadlineExceededError):
        await collect(client, timeout_s=0.2)
    await asyncio.wait_for(engine.ended.get(), SOON_S)
    assert engine.live == set()


async def test_a_deadline_that_passes_while_tokenizing_never_queues(client: Client, engine: ScriptedEngine) -> None:
    begun = asyncio.Event()

    async def tokenize(text: str, *, bounded: bool = True) -> list[int]:
        begun.set()
        await forever()
        return [1]

    engine.tokenize = tokenize  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceededError):
        await collect(client, timeout_s=0.1)
    assert begun.is_set()
    assert engine.submitted == []


async def test_tokenize_and_detokenize(client: Client) -> None:
    assert await client.tokenize("AB") == [65, 66]
    assert await client.tokenize("") == []
    assert await client.tokenize(chat(("u", "A"))) == [60, 117, 62, 65]
    assert await client.detokenize([65, 2, 66]) == "AB"
    assert await client.detokenize([65, 2, 66], skip_special_tokens=False) == "A\x02B"
    with pytest.raises(InvalidRequestError) as caught:
        await client.detokenize([1, 512])
    assert [violation.field for violation in caught.value.violations] == ["token_ids[1]"]


class TestServersLimit:
    @pytest.fixture
    def settings(self) -> SchedulerSettings:
        return SchedulerSettings(listen_address="127.0.0.1:0", max_request_s=0.1)

    async def test_the_servers_limit_ends_a_request_without_a_deadline(
        self, client: Client, engine: ScriptedEngine
    ) -> None:
        engine.script = [ANSWER[0], forever]
        with pytest.raises(DeadlineExceededError, match=r"server's limit of 0\.1 s"):
            await collect(client)
        assert engine.live == set()

    @pytest.mark.parametrize(
        ("streams", "num_samples"), [(True, 1), (True, 100), (False, 100)], ids=["stream", "samples", "whole samples"]
    )
    async def test_the_servers_limit_frees_answers_that_nobody_reads(
        self, address: str, engine: ScriptedEngine, streams: bool, num_samples: int
    ) -> None:
        text = "x" * 262144  # a hundred of them are more than the transport takes for a reader who does not read
        engine.script = [Delta(text)] * 1000
        if num_samples > 1:
            engine.script = [
                Delta(text, finish=Finish(), usage=Usage(1, 1, 0), index=index) for index in range(num_samples)
            ]
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            request = generate_request("hi", n=num_samples)
            request.stream = streams
            call = stub.Generate(request)
            await call.read()
            await asyncio.wait_for(engine.ended.get(), SOON_S)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_to_the_end(call)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


async def test_calls_that_answers_share_tell_at_once_which_scheduler_they_have_come_to(
    address: str, settings: SchedulerSettings
) -> None:
    async def told(of: str) -> str:
        async with grpc.aio.insecure_channel(of) as channel:
            call = inference_pb2_grpc.InferenceServiceStub(channel).GenerateMany()  # type: ignore[no-untyped-call]
            metadata = dict(await asyncio.wait_for(call.initial_metadata(), SOON_S))
            call.cancel()
            return str(metadata[SCHEDULER_KEY])

    other = ApiServer(ScriptedEngine(), settings)
    try:
        names = [await told(address), await told(address), await told(await other.start())]
    finally:
        await other.stop(0.1)
    assert names[0] == names[1] != names[2]
