"""A traced request is one trace, of caller, scheduler and executor; where nobody asks for traces there are none."""

import socket
import subprocess
import sys
from typing import Any

import grpc.aio
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from executor_svc.step_traces import MAX_SINGLE_STEPS
from paged.client import Client, generate_request
from paged.v1 import inference_pb2_grpc
from tests.otlp import Collector, Received, collector
from tests.processes import wait_for
from tests.system.conftest import System
from tests.system.requests import ready

CALL, VLLM_CALL = "paged.v1.InferenceService/Generate", "vllm.grpc.engine.VllmEngine/Generate"
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "swordfish"


async def generate(system: System, **said: Any) -> None:
    async with Client(system.address) as client:
        await ready(client)
    await call_as_it_is(system, **said)


async def call_as_it_is(
    system: System, *, traceparent: str = "", tracestate: str = "", num_tokens: int = 50, **options: Any
) -> None:
    given = {"traceparent": traceparent, "tracestate": tracestate}
    metadata = [(key, value) for key, value in given.items() if value]
    async with grpc.aio.insecure_channel(system.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = generate_request(SECRET, max_tokens=num_tokens, ignore_eos=True, temperature=0, **options)
        call = stub.Generate(request, metadata=metadata)
        async for message in call:
            assert message.request_id
            if options.get("request_id") == "left":
                break


def traced(system: System, spans: Collector, *scheduler_flags: str) -> System:
    system.executor_flags = ["--traces-endpoint", spans.endpoint]
    system.scheduler_flags = ["--traces-endpoint", spans.endpoint, *scheduler_flags]
    return system.start()


def is_within(inner: Received, outer: Received) -> bool:
    slack = 1_000_000  # ns, between clocks that are read one after the other
    begin, end = inner.span.start_time_unix_nano, inner.span.end_time_unix_nano
    return outer.span.start_time_unix_nano - slack <= begin <= end <= outer.span.end_time_unix_nano + slack


async def test_a_request_is_one_trace_from_its_caller_to_the_steps(system: System) -> None:
    with collector() as spans:
        traced(system, spans)
        await generate(system, traceparent=f"00-{TRACE}-{CALLER}-01")
        wait_for(lambda: spans.named(CALL) and spans.named("steps"), "spans of both services")
        received = spans.spans()
        payloads = b"".join(spans.payloads)
    assert {one.span.trace_id.hex() for one in received} == {TRACE}
    (call,) = [one for one in received if one.span.name == CALL]
    assert call.span.parent_span_id.hex() == CALLER
    others = [one for one in received if one is not call]
    assert {one.span.parent_span_id for one in others} == {call.span.span_id}
    assert {one.span.name for one in others if one.service == "paged-scheduler"} == {"queue", "prefill", "decode"}
    assert {one.span.name for one in others if one.service == "paged-executor"} == {"step", "steps"}
    queue, prefill, decode = (one for name in ("queue", "prefill", "decode") for one in spans.named(name))
    assert all(is_within(one, call) for one in (queue, prefill, decode))
    assert queue.span.end_time_unix_nano == prefill.span.start_time_unix_nano
    assert prefill.span.end_time_unix_nano == decode.span.start_time_unix_nano
    steps = [one for one in others if one.service == "paged-executor"]
    assert len(steps) == MAX_SINGLE_STEPS + 1
    facts = call.attributes
    computed = sum(one.attributes["paged.step.tokens"] for one in steps)
    assert computed == facts["gen_ai.usage.input_tokens"] + 49  # the last token is drawn, not computed
    assert (facts["gen_ai.usage.output_tokens"], facts["rpc.grpc.status_code"]) == (50, 0)
    assert SECRET.encode() not in payloads


async def test_requests_are_traced_as_their_callers_say_and_else_by_the_share(system: System) -> None:
    with collector() as spans:
        traced(system, spans, "--traces-share", "0")
        await generate(system)
        await generate(system, traceparent="00-1111111111111111eeeeeeeeeeeeeeee-b7ad6b7169203331-00")
        await generate(system, traceparent="no trace at all")
        await generate(system, traceparent=f"00-{TRACE}-{CALLER}-01")
        wait_for(lambda: spans.named(CALL) and spans.named("steps"), "spans of both services")
        assert {one.span.trace_id.hex() for one in spans.spans()} == {TRACE}


async def test_a_call_that_is_left_or_refused_says_so_in_its_span(system: System) -> None:
    with collector() as spans:
        traced(system, spans)
        await generate(system, request_id="left", num_tokens=2000)
        with pytest.raises(grpc.aio.AioRpcError):
            await generate(system, model="another")
        wait_for(lambda: len(spans.named(CALL)) == 2, "spans of both calls")
        by_code = {one.attributes["rpc.grpc.status_code"]: one.span for one in spans.named(CALL)}
        (decode,) = spans.named("decode")
        left, refused = grpc.StatusCode.CANCELLED.value[0], grpc.StatusCode.NOT_FOUND.value[0]
        assert by_code.keys() == {left, refused}
        assert decode.span.parent_span_id == by_code[left].span_id


async def test_a_servers_fault_is_an_error_of_its_span_and_a_callers_is_none(system: System) -> None:
    with collector() as spans:
        traced(system, spans, "--executor-wait-s", "0.1", "--new-request-wait-s", "0")
        with pytest.raises(grpc.aio.AioRpcError):
            await generate(system, model=SECRET)
        system.executor.kill()
        wait_for(lambda: "executor_lost" in system.scheduler.log, "the loss")
        with pytest.raises(grpc.aio.AioRpcError):
            await call_as_it_is(system)
        wait_for(lambda: len(spans.named(CALL)) == 2, "spans of both calls")
        refused, failed = sorted(spans.named(CALL), key=lambda one: one.span.start_time_unix_nano)
        payloads = b"".join(spans.payloads)
    assert refused.attributes["rpc.grpc.status_code"] == grpc.StatusCode.NOT_FOUND.value[0]
    assert refused.span.status.code == Status.STATUS_CODE_UNSET
    assert refused.attributes["error.type"] == "ModelNotFound"
    assert failed.attributes["rpc.grpc.status_code"] == grpc.StatusCode.UNAVAILABLE.value[0]
    assert failed.span.status.code == Status.STATUS_CODE_ERROR
    assert SECRET.encode() not in payloads


async def test_what_a_caller_says_of_its_trace_goes_along(system: System) -> None:
    with collector() as spans:
        traced(system, spans)
        await generate(system, traceparent=f"00-{TRACE}-{CALLER}-01", tracestate="vendor=1")
        wait_for(lambda: spans.named(CALL), "the call's span")
        (call,) = spans.named(CALL)
    assert call.span.trace_state == "vendor=1"
    assert call.span.kind == Span.SPAN_KIND_SERVER


async def test_calls_of_a_gateway_are_traced_too(system: System) -> None:
    with collector() as spans:
        traced(system, spans)
        async with Client(system.address) as client:
            await ready(client)
        async with grpc.aio.insecure_channel(system.address) as channel:
            asked = vllm_engine_pb2.GenerateRequest(request_id="one", text=SECRET, stream=True)
            asked.sampling_params.max_tokens = 4
            messages = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(
                asked, metadata=[("traceparent", f"00-{TRACE}-{CALLER}-01")]
            )
            assert [message async for message in messages]
        wait_for(lambda: spans.named(VLLM_CALL) and spans.named("decode"), "spans of the call")
        (call,) = spans.named(VLLM_CALL)
        assert call.span.parent_span_id.hex() == CALLER
        assert {one.span.trace_id.hex() for one in spans.spans()} == {TRACE}


async def test_a_collector_that_is_away_costs_spans_and_nothing_else(system: System) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        spans = Collector(f"http://127.0.0.1:{nobody.getsockname()[1]}/v1/traces")
        traced(system, spans)
        for _ in range(3):
            await generate(system)
        for service in (system.scheduler, system.executor):
            wait_for(lambda service=service: "opentelemetry" in service.log or "span" in service.log, "a warning")
            assert service.stop() == 0


@pytest.mark.parametrize("service", ["scheduler_svc", "executor_svc"])
def test_without_traces_nothing_of_opentelemetry_is_loaded(service: str) -> None:
    code = f"import {service}.__main__, sys; print([name for name in sys.modules if 'opentelemetry' in name])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize("service", ["scheduler_svc", "executor_svc"])
def test_traces_without_the_extra_are_refused_with_its_name(service: str) -> None:
    code = f"import sys; sys.modules['opentelemetry'] = None; from {service}.__main__ import main; main()"
    flags = [
        "--traces-endpoint",
        "http://127.0.0.1:1/v1/traces",
        *(["--simulate"] if service == "executor_svc" else []),
    ]
    ran = subprocess.run([sys.executable, "-c", code, *flags], capture_output=True, text=True, check=False)
    assert (ran.returncode, "extra tracing" in ran.stderr) == (2, True), ran.stderr
