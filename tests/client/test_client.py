"""The client: what it sends, what it raises, and how little it needs."""

import asyncio
import subprocess
import sys

import grpc
import pytest

from paged import errors
from paged.client import Client, InvalidRequestError, PagedClientError, UnavailableError, chat, generate_request
from paged.v1 import inference_pb2
from tests.api.scripted_engine import ANSWER, ScriptedEngine, forever

SOON_S = 20.0


def test_options_that_are_left_out_stay_unset() -> None:
    request = generate_request("hi")
    assert not request.HasField("stream")
    assert not request.HasField("logprobs")
    assert request.sampling.ListFields() == []
    assert request.stop.ListFields() == []


def test_options_that_are_zero_are_set() -> None:
    request = generate_request("hi", temperature=0, top_k=0, seed=0, max_tokens=0, logprobs=0)
    assert [request.sampling.HasField(name) for name in ("temperature", "top_k", "seed", "top_p")] == [1, 1, 1, 0]
    assert request.stop.HasField("max_tokens")
    assert request.HasField("logprobs")


def test_each_kind_of_prompt_has_its_field() -> None:
    assert generate_request("").WhichOneof("prompt") == "text"
    assert generate_request([]).WhichOneof("prompt") == "token_ids"
    assert generate_request((1, 2)).token_ids.ids == [1, 2]
    expected = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    assert generate_request(chat(("user", "hi"))).chat == expected
    assert generate_request(chat({"role": "user", "content": "hi"})).chat == expected


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        generate_request("hi", temprature=0.5)  # type: ignore[call-arg]


@pytest.mark.parametrize("option", ["max_tokens", "top_k", "seed"])
def test_a_negative_count_cannot_be_sent(option: str) -> None:
    with pytest.raises(ValueError, match="-1"):
        generate_request("hi", **{option: -1})


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError) as caught:
            await client.complete("hi")
    assert caught.value.code == grpc.StatusCode.UNAVAILABLE


async def test_without_the_detail_messages_an_error_still_has_code_and_message(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "HAS_DETAILS", False)
    with pytest.raises(InvalidRequestError, match="max_tokens") as caught:
        await client.complete("hi", max_tokens=0)
    assert caught.value.violations == ()


async def test_cancelling_the_callers_task_is_a_cancellation_and_no_error_of_ours(
    client: Client, engine: ScriptedEngine
) -> None:
    engine.script = [ANSWER[0], forever]
    got_one = asyncio.Event()

    async def read() -> None:
        async for _ in client.generate("hi"):
            got_one.set()

    task = asyncio.create_task(read())
    await asyncio.wait_for(got_one.wait(), SOON_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(engine.ended.get(), SOON_S)


async def test_many_calls_share_a_connection(client: Client) -> None:
    answers = await asyncio.gather(*(client.complete("hi", request_id=f"r{i}") for i in range(100)))
    assert {answer.text for answer in answers} == {"Once!"}
    assert [answer.request_id for answer in answers] == [f"r{i}" for i in range(100)]


def test_every_error_is_one_class() -> None:
    assert all(issubclass(kind, PagedClientError) for kind in errors.CLASSES.values())


def test_the_client_imports_nothing_beyond_grpcio_and_protobuf() -> None:
    code = "import sys, paged.client; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    foreign = {"numpy", "pydantic", "structlog", "zmq", "tokenizers", "jinja2", "typer", "rich", "torch", "uvloop"}
    assert "grpc" in loaded
    assert not foreign & set(loaded)


def test_the_stubs_alone_do_not_load_grpcio() -> None:
    code = "import sys, paged.v1.executor_pb2; print('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_one_stop_string_may_be_given_as_it_is() -> None:
    assert list(generate_request("x", stop="abc").stop.strings) == ["abc"]
    assert list(generate_request("x", stop=["a", "b"]).stop.strings) == ["a", "b"]


@pytest.mark.parametrize(("name", "value"), [("max_tokens", -1), ("seed", 2**64), ("logprobs", "many"), ("top_k", 0.5)])
def test_a_value_that_the_message_cannot_hold_is_named(name: str, value: object) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
        generate_request("x", **{name: value})  # type: ignore[misc]


async def test_a_client_that_is_closed_says_so(address: str, engine: ScriptedEngine) -> None:
    """gRPC would raise an error of its own for a channel that is closed; an attempt may come after that."""
    engine.script = [ANSWER[0], forever]
    client = Client(address)
    answer = client.generate("hi")
    await asyncio.wait_for(anext(answer), SOON_S)
    await client.close()
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(anext(answer), SOON_S)
    await client.close()
    for call in (anext(client.generate("hi")), client.complete("hi"), client.tokenize("hi"), client.load()):
        with pytest.raises(RuntimeError, match="the client is closed"):
            await asyncio.wait_for(call, SOON_S)
