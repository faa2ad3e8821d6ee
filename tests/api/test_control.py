"""What operators see and do."""

import asyncio

import pytest

from paged.client import Client
from paged.v1 import control_pb2
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


async def test_a_model_without_a_begin_token_has_none(client: Client, engine: ScriptedEngine) -> None:
    assert engine.model is not None
    engine.model.ClearField("bos_token_id")
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
