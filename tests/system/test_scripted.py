"""What the model says and suffers is scripted: texts that end in odd ways, logits that are not finite, poison."""

import asyncio
import json
import random

import pytest

from paged.client import Client, InvalidRequestError, RequestAbortedError, ServerError
from paged.v1 import inference_pb2
from tests.system.conftest import System
from tests.system.requests import answer, idle_load, mixed_calls, ready

PROMPT = [1, 2, 3]


def utf8(text: str) -> list[int]:
    """Ids of the simulated tokenizer: one for each byte."""
    return list(text.encode())


def script(system: System, **entries: list[dict]) -> None:
    path = system.directory / "script.json"
    path.write_text(json.dumps(entries))
    system.executor_flags += ["--simulate-script", str(path)]


async def stream_and_whole(system: System, **options) -> tuple[str, inference_pb2.GenerateResponse]:
    """The text of a stream, its pieces joined, and the last message of the same request asked for as a whole."""
    async with Client(system.address) as client:
        await ready(client)
        text, last = "", inference_pb2.GenerateResponse()
        async for message in client.generate(PROMPT, temperature=0, **options):
            text, last = text + message.text, message
        whole = await client.complete(PROMPT, temperature=0, **options)
    assert whole.text == text
    assert whole.finish == last.finish
    assert whole.usage.completion_tokens == last.usage.completion_tokens == len(whole.token_ids)
    return text, last


@pytest.mark.parametrize(
    ("said", "stop", "text", "matched", "num_tokens"),
    [
        ("lmnopqrstu", ["nopqrst", "ZZ"], "lm", "nopqrst", 9),
        ("nopX and more ZZ", ["nopqrst", "ZZ"], "nopX and more ", "ZZ", 16),
        ("xabc", ["ab", "abc"], "x", "ab", 3),
        ("café 👩‍👩‍👧 end", [" end"], "café 👩‍👩‍👧", " end", len("café 👩‍👩‍👧 end".encode())),
    ],
)
async def test_text_ends_exactly_before_the_first_stop_string(
    system: System, said: str, stop: list[str], text: str, matched: str, num_tokens: int
) -> None:
    script(system, replies=[{"prompt": PROMPT, "output": utf8(said + "never seen")}])
    system.start()
    streamed, last = await stream_and_whole(system, stop=stop, max_tokens=100)
    assert streamed == text
    assert last.finish.stop_string == matched
    assert last.finish.reason == inference_pb2.FINISH_REASON_STOP
    assert last.usage.completion_tokens == num_tokens


async def test_held_back_text_arrives_when_the_answer_ends_by_length(system: System) -> None:
    script(system, replies=[{"prompt": PROMPT, "output": utf8("xyab")}])
    system.start()
    streamed, last = await stream_and_whole(system, stop=["abc"], max_tokens=4)
    assert streamed == "xyab"
    assert last.finish.reason == inference_pb2.FINISH_REASON_LENGTH


async def test_an_end_token_is_counted_and_has_no_text(system: System) -> None:
    script(system, replies=[{"prompt": PROMPT, "output": [*utf8("done"), 257]}])
    system.start()
    streamed, last = await stream_and_whole(system, max_tokens=100)
    assert streamed == "done"
    assert last.finish.token_id == 257
    assert last.usage.completion_tokens == 5


@pytest.mark.parametrize(
    "asked", [{}, {"n": 5}, {"beam": inference_pb2.BeamSearch(width=4), "n": 2}], ids=["one", "n", "beam"]
)
async def test_logits_that_are_not_finite_end_their_request_alone(system: System, asked: dict) -> None:
    script(system, faults=[{"kind": "not_finite", "row_of_prompt": PROMPT}])
    system.start()
    calls = mixed_calls(20, random.Random(8))
    async with Client(system.address) as client:
        await ready(client)
        running = [asyncio.create_task(answer(client, call)) for call in calls]
        with pytest.raises(ServerError):
            await client.complete_samples(PROMPT, max_tokens=20, **asked)
        assert await asyncio.gather(*running) == [call.expected() for call in calls]
        load = await idle_load(client)
    assert load.failed_requests == 1
    assert load.not_finite_sequences >= 1
    assert system.scheduler.log.count("answer_failed") == 1
    assert "not finite" in system.scheduler.log
    assert load.used_blocks == 0


@pytest.mark.parametrize(
    "asked", [{}, {"n": 5}, {"beam": inference_pb2.BeamSearch(width=4), "n": 2}], ids=["one", "n", "beam"]
)
async def test_one_poisonous_request_among_many_fails_alone(system: System, asked: dict) -> None:
    script(system, faults=[{"kind": "raise", "row_of_prompt": PROMPT}])
    system.executor_flags += ["--tokens-per-step", "300", "--simulate-fixed-us", "2000"]
    system.start()
    calls = mixed_calls(30, random.Random(9))
    async with Client(system.address) as client:
        await ready(client)
        running = [asyncio.create_task(answer(client, call)) for call in calls]
        while (await client.load()).generated_tokens < 50:
            await asyncio.sleep(0.01)
        with pytest.raises(ServerError):
            await client.complete_samples(PROMPT, max_tokens=20, **asked)
        assert await asyncio.gather(*running) == [call.expected() for call in calls]
        load = await idle_load(client)
    assert load.failed_requests == 1
    assert load.executor_losses == 4, "twice among others, twice alone"
    assert load.used_blocks == 0


async def test_what_memory_can_never_hold_is_refused_by_name_and_counts_as_nothing(system: System) -> None:
    system.executor_flags = ["--num-blocks", "5"]  # four to lend: 64 slots
    system.start()
    async with Client(system.address) as client:
        await ready(client)
        for field, options in {
            "prompt": {"prompt": [300] * 65},
            "stop.max_tokens": {"max_tokens": 100},
            "stop.min_tokens": {"min_tokens": 100},
        }.items():
            with pytest.raises(InvalidRequestError, match=f"{field}: "):
                await client.complete(options.pop("prompt", PROMPT), **options)
        whole = await client.complete(PROMPT, temperature=0, ignore_eos=True)
        assert len(PROMPT) + whole.usage.completion_tokens == 65
        load = await idle_load(client)
    assert (load.finished_requests, load.cancelled_requests, load.failed_requests) == (1, 0, 0)


async def test_an_aborted_request_ends_cancelled_and_counts_so(system: System) -> None:
    system.executor_flags = ["--simulate-fixed-us", "5000"]
    system.start()
    async with Client(system.address) as client:
        await ready(client)
        running = asyncio.create_task(client.complete(PROMPT, request_id="mine", ignore_eos=True, max_tokens=2000))
        while (await client.load()).generated_tokens < 5:
            await asyncio.sleep(0.01)
        assert list(await client.abort(["mine", "nobody's"])) == ["mine"]
        with pytest.raises(RequestAbortedError):
            await running
        load = await idle_load(client)
    assert (load.finished_requests, load.cancelled_requests, load.failed_requests) == (0, 1, 0)
    assert load.used_blocks == 0
