"""VllmEngine over a real server: the same engine in the words that ready-made gateways speak."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc

from paged.v1 import control_pb2
from scheduler_svc.api.vllm_loads import WINDOW_US, LoadRecords, Throughput
from scheduler_svc.block_watch import BlockChanges
from scheduler_svc.core.cache_events import CachedBlock
from scheduler_svc.core.sequence import TokenLogprobs
from scheduler_svc.errors import Unavailable
from scheduler_svc.requests import Delta, Finish, Usage
from scheduler_svc.settings import SchedulerSettings
from tests.api.scripted_engine import ANSWER, ScriptedEngine, forever

SOON_S = 20.0
PROMPT = vllm.TokenizedInput(input_ids=[5, 6, 7])


@pytest.fixture
async def stub(address: str) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield vllm_grpc.VllmEngineStub(channel)


async def collect(stub: Any, **fields: Any) -> list[vllm.GenerateResponse]:
    """A request with these fields, and a prompt unless they have one."""
    if "text" not in fields:
        fields.setdefault("tokenized", PROMPT)
    return [message async for message in stub.Generate(vllm.GenerateRequest(request_id="mine", **fields))]


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def test_a_stream_has_a_piece_a_delta_and_then_the_end(stub: Any) -> None:
    *pieces, end = await collect(stub, stream=True)
    assert [list(m.chunk.token_ids) for m in pieces] == [[11], [12], [13, 14], [2]]
    assert [m.chunk.completion_tokens for m in pieces] == [1, 1, 2, 1]
    assert {m.chunk.prompt_tokens for m in pieces} == {3}
    assert pieces[-1].chunk.cached_tokens == 4
    assert end.complete == vllm.GenerateComplete(
        finish_reason="stop", prompt_tokens=3, completion_tokens=5, cached_tokens=4
    )


async def test_a_whole_answer_is_one_message_a_sample(stub: Any, engine: ScriptedEngine) -> None:
    engine.script = [
        Delta("a", [1], index=1),
        Delta("b", [2], index=0, finish=Finish(), usage=Usage(3, 1, 0)),
        Delta("c", [3], index=1, finish=Finish(stop_string="c"), usage=Usage(3, 2, 0)),
    ]
    first, second = await collect(stub, sampling_params=vllm.SamplingParams(n=2, stop=["c"]))
    assert (first.complete.index, list(first.complete.output_ids), first.complete.finish_reason) == (0, [2], "length")
    assert (second.complete.index, list(second.complete.output_ids)) == (1, [1, 3])
    assert (second.complete.matched_stop_str, second.complete.completion_tokens) == ("c", 2)


async def test_an_end_token_is_told_only_where_it_was_asked_for(stub: Any) -> None:
    (silent,) = await collect(stub)
    assert silent.complete.WhichOneof("matched_stop") is None
    (asked,) = await collect(stub, sampling_params=vllm.SamplingParams(stop_token_ids=[2]))
    assert asked.complete.matched_token_id == 2


async def test_log_probabilities_of_the_prompt_come_with_the_first_piece(stub: Any, engine: ScriptedEngine) -> None:
    engine.script = [
        Delta(prompt_logprobs=[TokenLogprobs(-1.0, 1, [6], [-1.0])]),
        Delta(prompt_logprobs=[TokenLogprobs(-2.0, 2, [8], [-0.5])]),
        *ANSWER,
    ]
    asked = vllm.SamplingParams(logprobs=1, prompt_logprobs=1)
    first, second, *_ = await collect(stub, stream=True, sampling_params=asked)
    told = first.chunk.input_logprobs
    assert list(told.token_ids) == [5, 6, 7]
    assert [entry.value if entry.HasField("value") else None for entry in told.token_logprobs] == [None, -1.0, -2.0]
    assert [list(top.token_ids) for top in told.top_logprobs] == [[], [6], [8]]
    assert not second.chunk.HasField("input_logprobs")
    assert list(second.chunk.output_logprobs.token_logprobs) == [-2.0]
    assert list(second.chunk.output_logprobs.top_logprobs[0].token_ids) == [3, 4]


async def test_what_the_request_says_reaches_the_engine(stub: Any, engine: ScriptedEngine) -> None:
    asked = vllm.SamplingParams(
        temperature=0.5,
        top_p=0.75,
        top_k=5,
        repetition_penalty=1.25,
        max_tokens=9,
        min_tokens=2,
        stop=["x"],
        stop_token_ids=[3],
        ignore_eos=True,
        seed=-1,
        include_stop_str_in_output=True,
        logit_bias={4: -2.0},
        regex="[0-9]+",
        n=2,
        truncate_prompt_tokens=2,
    )
    await collect(stub, sampling_params=asked)
    await collect(stub, text="AB")
    request, plain = engine.submitted
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (0.5, 0.75, 5, 1.25)
    assert (request.max_tokens, sampling.min_tokens, request.stop_strings) == (9, 2, ("x",))
    assert (request.stop_token_ids, request.ignore_eos, request.include_stop_string) == ((3,), True, True)
    assert (sampling.seed, sampling.rules.logit_bias) == (2**64 - 1, ((4, -2.0),))
    assert request.grammar is not None
    assert (request.grammar.kind, request.grammar.source) == ("regex", "[0-9]+")
    assert (request.num_samples, request.prompt_ids, request.request_id) == (2, [6, 7], "mine")
    assert (plain.prompt_ids, plain.sampling.temperature, plain.max_tokens) == ([65, 66], 1.0, None)


@pytest.mark.parametrize(
    ("constraint", "kind", "source"),
    [
        ({"json_schema": '{"type": "null"}'}, "json_schema", '{"type": "null"}'),
        ({"json_object": True}, "json_schema", '{"type": "object"}'),
        ({"grammar": 'start: "a"'}, "lark", 'start: "a"'),
        ({"choice": vllm.ChoiceConstraint(choices=["a", "b"])}, "choice", ("a", "b")),
    ],
)
async def test_each_constraint_becomes_a_grammar(
    stub: Any, engine: ScriptedEngine, constraint: dict[str, Any], kind: str, source: object
) -> None:
    await collect(stub, sampling_params=vllm.SamplingParams(**constraint))
    grammar = engine.submitted[0].grammar
    assert grammar is not None
    assert (grammar.kind, grammar.source) == (kind, source)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"media_refs": vllm.MediaRefs()}, "media_refs"),
        ({"mm_inputs": vllm.MultimodalInputs()}, "mm_inputs"),
        ({"kv_transfer_params_json": "{}"}, "kv_transfer_params_json"),
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
        ({"sampling_params": vllm.SamplingParams(structural_tag="x")}, "structural_tag"),
        ({"sampling_params": vllm.SamplingParams(logprobs=-1)}, "logprobs"),
        ({"sampling_params": vllm.SamplingParams(logit_bias={-1: 1.0})}, "logit_bias"),
        ({"sampling_params": vllm.SamplingParams(top_p=1.5)}, "sampling.top_p"),
        ({"tokenized": vllm.TokenizedInput(input_ids=[9999])}, "token_ids"),
        ({"tokenized": vllm.TokenizedInput()}, "token_ids"),
    ],
)
async def test_what_is_not_done_or_wrong_is_refused_by_name(
    stub: Any, engine: ScriptedEngine, fields: dict[str, Any], named: str
) -> None:
    error = await refusal(collect(stub, **fields))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert named in str(error.details())
    assert engine.submitted == []


async def test_log_probabilities_of_a_prompt_that_fit_no_message_are_refused(stub: Any, engine: ScriptedEngine) -> None:
    engine.facts.max_model_len, engine.facts.vocab_size = 1 << 20, 1 << 20
    many = vllm.TokenizedInput(input_ids=[1] * 100_000)
    error = await refusal(collect(stub, tokenized=many, sampling_params=vllm.SamplingParams(prompt_logprobs=20)))
    assert (error.code(), engine.submitted) == (grpc.StatusCode.INVALID_ARGUMENT, [])


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Embed", vllm.EmbedRequest()),
        ("StartProfile", common.StartProfileRequest()),
        ("StopProfile", common.StopProfileRequest()),
    ],
)
async def test_what_there_is_nothing_for_is_unimplemented(stub: Any, method: str, request_: Any) -> None:
    error = await refusal(getattr(stub, method)(request_))
    assert error.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_request_is_ended_by_its_id_or_by_hanging_up(stub: Any, engine: ScriptedEngine) -> None:
    engine.script = [ANSWER[0], forever]
    call = stub.Generate(vllm.GenerateRequest(request_id="mine", tokenized=PROMPT, stream=True))
    await call.read()
    await stub.Abort(vllm.AbortRequest(request_ids=["mine", "nobody's"]))
    assert engine.aborted == ["mine"]
    call.cancel()
    assert await asyncio.wait_for(engine.ended.get(), SOON_S) == "mine"


async def test_health_says_whether_requests_can_be_served(stub: Any, address: str, engine: ScriptedEngine) -> None:
    assert (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy
    async with grpc.aio.insecure_channel(address) as channel:
        standard = health_pb2_grpc.HealthStub(channel)
        status = await standard.Check(health_pb2.HealthCheckRequest(service="vllm.grpc.engine.VllmEngine"))
        assert status.status == health_pb2.HealthCheckResponse.SERVING
    engine.ready = False
    assert not (await stub.HealthCheck(vllm.HealthCheckRequest())).healthy
    engine.model_error = Unavailable("no executor has been attached yet")
    with pytest.raises(grpc.aio.AioRpcError, match="no executor has been attached yet") as refused:
        await stub.HealthCheck(vllm.HealthCheckRequest())
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


class TestModelSampling:
    @pytest.fixture
    def settings(self) -> SchedulerSettings:
        return SchedulerSettings(listen_address="127.0.0.1:0", model_sampling=True)

    async def test_the_model_and_the_server_are_told_of(self, stub: Any) -> None:
        info = await stub.GetModelInfo(vllm.GetModelInfoRequest())
        assert (info.served_model_name, info.model_type, list(info.architectures)) == (
            "scripted",
            "scripted",
            ["ScriptedForCausalLM"],
        )
        assert (info.max_context_length, info.vocab_size, info.is_generation) == (64, 512, True)
        assert json.loads(info.default_sampling_params_json) == {"temperature": 0.5, "top_k": 7.0}
        server = await stub.GetServerInfo(vllm.GetServerInfoRequest())
        assert (server.block_size, server.data_parallel_size, server.server_type) == (16, 1, "vllm-grpc")


async def test_the_tokenizers_files_come_in_pieces_with_their_hash_last(stub: Any, engine: ScriptedEngine) -> None:
    engine.bundle = bytes(200_000)
    chunks = [chunk async for chunk in stub.GetTokenizer(common.GetTokenizerRequest())]
    assert b"".join(chunk.data for chunk in chunks) == engine.bundle
    assert [chunk.sha256 for chunk in chunks] == ["", "", "", hashlib.sha256(engine.bundle).hexdigest()]


async def test_the_load_is_told_when_asked(stub: Any) -> None:
    answer = await stub.GetLoads(vllm.GetLoadsRequest(include=["core"]))
    (load,) = answer.loads
    assert (answer.dp_rank_count, load.num_running_reqs) == (1, 0)
    error = await refusal(stub.GetLoads(vllm.GetLoadsRequest(dp_rank=1)))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_cached_blocks_are_told_as_chains_with_their_tokens(stub: Any, engine: ScriptedEngine) -> None:
    def block(number: int, parent: int | None) -> tuple[bytes, CachedBlock]:
        ids = b"".join(token.to_bytes(4, "little") for token in (number, number + 1))
        return digest(number), CachedBlock(None if parent is None else digest(parent), ids)

    def digest(number: int) -> bytes:
        return number.to_bytes(8, "little") + bytes(24)

    engine.num_unknown_blocks = 3
    engine.changes = [
        BlockChanges(stored=dict([block(1, None), block(2, 1), block(9, None), block(3, 2)])),
        BlockChanges(removed=[digest(9)]),
    ]
    call = stub.SubscribeKvEvents(
        common.SubscribeKvEventsRequest(start_sequence_number=7, load_records_before_first_batch=True)
    )
    load, beginning, stored, removed = [await call.read() for _ in range(4)]
    assert (load.load.load_only, load.sequence_number, len(load.events)) == (True, 6, 0)
    assert (beginning.sequence_number, beginning.snapshot.count, beginning.snapshot.unknown_before) == (7, 1, 3)
    assert beginning.events[0].HasField("cleared")
    chains = [event.stored for event in stored.events]
    assert [[b.block_hash for b in chain.blocks] for chain in chains] == [[1, 2], [9], [3]]
    assert [chain.parent_block_hash if chain.HasField("parent_block_hash") else None for chain in chains] == [
        None,
        None,
        2,
    ]
    assert list(chains[0].blocks[1].token_ids) == [2, 3]
    assert list(removed.events[0].removed.block_hashes) == [9]
    assert [m.sequence_number for m in (stored, removed)] == [8, 9]
    ids = [event.event_id for message in (beginning, stored, removed) for event in message.events]
    assert ids == [1, 2, 3, 4, 5]
    samples = [m.load.sample for m in (load, beginning, stored, removed)]
    assert samples == [1, 2, 3, 4]
    call.cancel()


async def test_numbers_that_messages_could_not_go_on_from_are_refused(stub: Any) -> None:
    asked = common.SubscribeKvEventsRequest(start_sequence_number=2**64 - 1)
    error = await refusal(stub.SubscribeKvEvents(asked).read())
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "start_sequence_number" in error.details()


def test_throughput_is_of_the_time_that_steps_took() -> None:
    throughput = Throughput()

    def load(tokens: int, step_us: int) -> control_pb2.GetLoadResponse:
        part = control_pb2.ExecutorLoad(endpoint="tcp://a:1", generated_tokens=tokens, step_us=step_us)
        return control_pb2.GetLoadResponse(executors=[part])

    assert throughput.of(load(10, WINDOW_US - 1)) == 0, "not known yet"
    assert throughput.of(load(100, WINDOW_US)) == 1000
    assert throughput.of(load(150, WINDOW_US + 10)) == 1000, "hardly any time has passed in steps"
    assert throughput.of(load(300, 2 * WINDOW_US)) == 2000
    assert throughput.of(control_pb2.GetLoadResponse()) == 0, "no executor"


def test_a_load_is_told_when_it_changes_and_now_and_then_and_less_often_when_idle() -> None:
    now, load = 0.0, vllm.SchedulerLoad(max_running_requests=8)
    records = LoadRecords(lambda: load, clock=lambda: now)

    def due() -> bool:
        return records.due() is not None

    assert due()
    assert not due()
    load.num_waiting_reqs = 1
    assert due()
    times = []
    for tenth in range(1, 200):
        now = tenth / 10
        times += [now] if due() else []
    assert times == [1.0, 2.0, 7.0, 12.0, 17.0]
