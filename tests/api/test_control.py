"""What operators see and do."""

import asyncio

import pytest

from paged.client import Client
from paged.v1 import control_pb2
from scheduler_svc.core.cache_events import CLEARED, REMOVED, STORED, Told
from scheduler_svc.settings import SchedulerSettings
from tests.api.scripted_engine import ANSWER, ScriptedEngine, forever


async def test_the_models_facts_are_told(client: Client) -> None:
    assert await client.model() == control_pb2.GetModelResponse(
        model="scripted",
        architecture="ScriptedForCausalLM",
        vocab_size=512,
        max_model_len=64,
        eos_token_ids=[2],
        bos_token_id=1,
        dtype="float32",
        has_chat_template=True,
        fingerprint="f00d",
        block_size=16,
    )


async def test_all_models_are_listed(client: Client) -> None:
    assert await client.models() == [await client.model("scripted")]


async def test_a_model_without_a_begin_token_has_none(client: Client, engine: ScriptedEngine) -> None:
    engine.facts.ClearField("bos_token_id")
    assert not (await client.model()).HasField("bos_token_id")


class TestShorterLength:
    @pytest.fixture
    def settings(self) -> SchedulerSettings:
        return SchedulerSettings(listen_address="127.0.0.1:0", max_model_len=32)

    async def test_the_model_is_as_long_as_the_setting_allows(self, client: Client) -> None:
        assert (await client.model()).max_model_len == 32


async def test_load_and_abort_reach_the_engine(client: Client, engine: ScriptedEngine) -> None:
    engine.script = [ANSWER[0], forever]
    answer = client.generate("hi", request_id="mine")
    await anext(answer)
    assert (await client.load()).running_sequences == 1
    assert await client.abort(["unknown", "mine"]) == ["mine"]
    await answer.aclose()
    await asyncio.wait_for(engine.ended.get(), 5)
    assert (await client.load()).running_sequences == 0


async def test_the_prefix_cache_is_flushed(client: Client) -> None:
    assert await client.flush_prefix_cache() == 7


async def test_a_watcher_is_told_what_is_cached_in_messages_of_bounded_size_and_then_each_change(
    client: Client, engine: ScriptedEngine
) -> None:
    digests = [i.to_bytes(32) for i in range(10_000)]
    engine.told = [
        ("tcp://a:1", Told(4, [(STORED, digest) for digest in digests], starts_anew=True, num_missed=3)),
        ("tcp://a:1", Told(7, [(STORED, b"a"), (REMOVED, b"b"), (CLEARED, b"")])),
        ("ipc://b", Told(7, [], starts_anew=True)),
    ]
    messages = [message async for message in client.watch_prefix_cache()]
    first, rest, changes, nothing = messages
    assert [event.stored for event in (*first.events, *rest.events)] == digests
    assert [(m.number, m.starts_anew, m.missed) for m in messages] == [
        (4, True, 3),
        (4, False, 0),
        (7, False, 0),
        (7, True, 0),
    ]
    assert [m.executor for m in messages] == ["tcp://a:1", "tcp://a:1", "tcp://a:1", "ipc://b"]
    assert [event.WhichOneof("event") for event in changes.events] == ["stored", "removed", "cleared"]
    assert (changes.events[0].stored, changes.events[1].removed) == (b"a", b"b")
    assert not nothing.events
