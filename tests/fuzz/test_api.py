"""Whatever a client sends, it gets a status, and the service goes on as if nothing had been."""

import asyncio
import contextlib
import json
import os
import random
import socket
from collections import Counter
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from paged.client import Client, chat, generate_request
from paged.v1 import control_pb2, inference_pb2
from tests.fuzz.messages import Fuzzer
from tests.processes import Service
from tests.system.conftest import System
from tests.system.requests import Call, answer, idle_load, ready

FILES = (inference_pb2, control_pb2, vllm, health_pb2, reflection_pb2)
# Their streams end when the caller goes.
ENDLESS = ("WatchPrefixCache", "Watch", "SubscribeKvEvents", "ServerReflectionInfo")
CONCURRENCY = 24
CALL_S = 20.0
NEXT_MESSAGE_S = 0.1  # of a stream that has begun; there may be nothing to tell
OK = grpc.StatusCode.OK
ALLOWED = {
    OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.CANCELLED,  # by Abort
}
MODEL = ["--simulate-max-model-len", "96", "--simulate-vocab-size", "32000", "--num-blocks", "200"]
# Another's request may be ended by its id, which is small enough to be met.
Request = inference_pb2.GenerateRequest


def methods() -> list[MethodDescriptor]:
    services = [service for file in FILES for service in file.DESCRIPTOR.services_by_name.values()]
    return [method for service in services for method in service.methods]


def valid_requests(method: MethodDescriptor) -> list[Message]:
    """To start from; an empty message where there is nothing better."""
    if method.input_type is vllm.GenerateRequest.DESCRIPTOR:
        return valid_vllm_requests()
    if method.input_type is inference_pb2.GenerateManyRequest.DESCRIPTOR:
        action = inference_pb2.GenerationAction
        cancel = action(number=7, cancel=inference_pb2.CancelGeneration())
        begin = [action(number=7, generate=given, timeout_ms=10_000) for given in valid_generations()]
        some = [[cancel], *([one] for one in begin), [action(number=i, generate=begin[0].generate) for i in range(9)]]
        return [inference_pb2.GenerateManyRequest(actions=actions, takes_plain=True) for actions in some]
    if method.input_type is not Request.DESCRIPTOR:
        return [method.input_type._concrete_class()]
    return valid_generations()


def valid_generations() -> list[Message]:
    grammar = inference_pb2.Grammar(regex="[a-c]{1,5}")
    plain = {"max_tokens": 8}
    requests = [
        generate_request("Once upon", **plain),
        generate_request([300, 301, 302], temperature=0, ignore_eos=True, stop=["xyz", "q"], **plain),
        generate_request(chat(("user", "Who is there?")), n=3, seed=7, logprobs=2, **plain),
        generate_request([300] * 40, best_of=3, n=2, prompt_logprobs=1, echo=True, **plain),
        generate_request([300] * 9, beam=inference_pb2.BeamSearch(width=3, length_penalty=0.5), n=2, **plain),
        generate_request([300], logit_bias={5: 1.0}, allowed_token_ids=[5, 6, 7], bad_words=["no"], **plain),
        generate_request([300] * 70, truncate_prompt_tokens=9, cache_salt="red", priority=3, tenant="t", **plain),
    ]
    constrained = generate_request([300, 301], **plain)
    constrained.grammar.CopyFrom(grammar)
    return [*requests, constrained]


def valid_vllm_requests() -> list[Message]:
    prompt = vllm.TokenizedInput(original_text="abc", input_ids=[300, 301, 302])
    sampled = {"max_tokens": 8, "temperature": 1.0}
    parameters = [
        {},
        {"ignore_eos": True, "stop": ["xyz", "q"], "stop_token_ids": [7], "logprobs": 2, "prompt_logprobs": 1},
        {"n": 3, "seed": 7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "frequency_penalty": 0.5, "min_tokens": 2},
        {"logit_bias": {5: 1.0}, "repetition_penalty": 1.2, "truncate_prompt_tokens": 2},
        {"regex": "[a-c]{1,5}"},
        {"choice": vllm.ChoiceConstraint(choices=["a", "b"])},
        {"json_object": True},
    ]
    requests: list[Message] = [
        vllm.GenerateRequest(
            tokenized=prompt, stream=i % 2 == 0, sampling_params=vllm.SamplingParams(**sampled, **more)
        )
        for i, more in enumerate(parameters)
    ]
    return [
        *requests,
        vllm.GenerateRequest(text="Once upon", stream=True, sampling_params=vllm.SamplingParams(**sampled)),
    ]


@dataclass
class Asked:
    """What was sent, and what became of it."""

    method: str
    data: bytes
    code: grpc.StatusCode | None
    message: str


class Assault:
    """Calls of all methods, many at a time."""

    def __init__(self, seed: int, channel: grpc.aio.Channel) -> None:
        self.fuzzer, self._channel = Fuzzer(seed), channel
        self.codes: Counter[tuple[str, grpc.StatusCode | None]] = Counter()
        self.wrong: list[Asked] = []
        generate = [method for method in methods() if method.name in ("Generate", "GenerateMany")]
        self._methods = methods() + 8 * generate
        self._valid = {method.full_name: valid_requests(method) for method in methods()}

    async def run(self, num_calls: int) -> None:
        left = iter(range(num_calls))

        async def some() -> None:
            for _ in left:
                await self._one()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(CONCURRENCY):
                tasks.create_task(some())

    async def _one(self) -> None:
        method = self.fuzzer.chance.choice(self._methods)
        data = self.fuzzer.bytes_of(self._message(method))
        code, message = await self._call(method, data)
        self.codes[method.full_name, code] += 1
        if code not in ALLOWED:
            self.wrong.append(Asked(method.full_name, data, code, message))

    def _message(self, method: MethodDescriptor) -> Message:
        chance = self.fuzzer.chance
        if chance.random() < 0.2:
            return self.fuzzer.message(method.input_type._concrete_class)
        return self.fuzzer.mutated(chance.choice(self._valid[method.full_name]))

    async def _call(self, method: MethodDescriptor, data: bytes) -> tuple[grpc.StatusCode | None, str]:
        path = f"/{method.containing_service.full_name}/{method.name}"
        try:
            async with asyncio.timeout(CALL_S):
                if method.name in ENDLESS:
                    return await self._call_endless(method, path, data)
                if not method.server_streaming:
                    await self._channel.unary_unary(path)(data)
                    return OK, ""
                call: Any = self._channel.unary_stream(path)(data)
                async for answer in call:
                    for code, message in ends_in(method, answer):
                        if code not in ALLOWED and code is not grpc.StatusCode.DEADLINE_EXCEEDED:  # it may name one
                            return code, message
                return await call.code(), await call.details()
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        except TimeoutError:
            return None, "no answer"

    async def _call_endless(
        self, method: MethodDescriptor, path: str, data: bytes
    ) -> tuple[grpc.StatusCode | None, str]:
        open_call = self._channel.stream_stream(path) if method.client_streaming else self._channel.unary_stream(path)
        call: Any = open_call(iter([data])) if method.client_streaming else open_call(data)
        try:
            for longest_s in (CALL_S, NEXT_MESSAGE_S):
                async with asyncio.timeout(longest_s):
                    if await call.read() is grpc.aio.EOF:
                        return await call.code(), await call.details()
            return OK, ""
        except TimeoutError:
            return (OK, "") if longest_s == NEXT_MESSAGE_S else (None, "no answer")
        finally:
            call.cancel()


def ends_in(method: MethodDescriptor, answer: bytes) -> list[tuple[grpc.StatusCode, str]]:
    """What the message says of how generations of its call have ended."""
    if method.output_type is not inference_pb2.GenerateManyResponse.DESCRIPTOR:
        return []
    updates = inference_pb2.GenerateManyResponse.FromString(answer).updates
    codes = {code.value[0]: code for code in grpc.StatusCode}
    return [(codes[update.end.code], update.end.message) for update in updates if update.HasField("end")]


def num_descriptors(service: Service) -> int:
    return len(os.listdir(f"/proc/{service.process.pid}/fd"))


async def assert_as_before(system: System, before: tuple[int, int]) -> None:
    """Nothing runs, nothing is kept, nothing was thrown, and answers are exact."""
    async with Client(system.address) as client:
        load = await idle_load(client)
        assert (load.used_blocks, load.unread_bytes, load.executor_losses) == (0, 0, 0)
        call = Call([300, 301, 302], 40, 0.0, 0, "")
        assert await answer(client, call) == call.expected()
    async with asyncio.timeout(20):
        while num_descriptors(system.scheduler) > before[0] + 8 or num_descriptors(system.executor) > before[1] + 2:
            await asyncio.sleep(0.05)
    for trace in ("call_failed", "Traceback", "audit_failed", "text_failed", "plan_failed", "result_failed"):
        assert trace not in system.scheduler.log, system.scheduler.log[-4000:]
    assert "Traceback" not in system.executor.log


async def assault(system: System, seed: int, num_calls: int) -> Assault:
    options = [("grpc.max_send_message_length", -1), ("grpc.max_metadata_size", 1 << 20)]
    async with grpc.aio.insecure_channel(system.address, options=options) as channel:
        attack = Assault(seed, channel)
        await attack.run(num_calls)
    return attack


@pytest.fixture
def small(system: System) -> System:
    """Whose answers are short, so that a call which asks for no end has one."""
    system.executor_flags = [*MODEL, "--metrics-address", "127.0.0.1:0", "--log-format", "json"]
    pages = ["--metrics-address", "127.0.0.1:0", "--block-map-address", "127.0.0.1:0"]
    system.scheduler_flags = ["--max-grammar-s", "0.5", "--log-level", "info", *pages]
    return system.start()


async def test_every_call_ends_with_a_status_and_leaves_nothing(small: System) -> None:
    async with Client(small.address) as client:
        await ready(client)
    before = num_descriptors(small.scheduler), num_descriptors(small.executor)
    attack = await assault(small, 1, 1500)
    assert attack.wrong == []
    assert {name for name, _ in attack.codes} == {method.full_name for method in methods()}
    await assert_as_before(small, before)


def noise(address: str, chance: random.Random, count: int) -> None:
    """Bytes that are not even the transport's."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    starts = (
        b"",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n",
        b"GET /watch?period_ms=",
        b"POST /prefixes HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nfffffffff\r\n",
        b"\xff" + bytes(8) + b"\x7f\x03",
        b"\x16\x03\x01",
    )
    for _ in range(count):
        with contextlib.suppress(ConnectionError), socket.create_connection((host, int(port)), timeout=30) as there:
            there.sendall(chance.choice(starts) + chance.randbytes(chance.choice((0, 9, 64, 5000))))


def make_noise(system: System, chance: random.Random) -> int:
    """At every address of both services. Returns how often."""
    addresses = [system.address, system.executor_endpoint, *pages_of(system)]
    for address in addresses:
        noise(address, chance, 100)
    return 100 * len(addresses)


def pages_of(system: System) -> list[str]:
    """Where HTTP is spoken: metrics of both, and the block map."""
    lines = [json.loads(line) for service in (system.scheduler, system.executor) for line in service.log.splitlines()]
    found = [line["address"] for line in lines if line["event"] in ("metrics_served", "block_map_listening")]
    assert len(found) == 3
    return found


async def assert_pages_are_there(system: System) -> None:
    async with aiohttp.ClientSession() as http:
        for address in pages_of(system):
            async with http.get(f"http://{address}/", timeout=aiohttp.ClientTimeout(30)) as page:
                assert page.status == 200


async def test_bytes_that_are_no_message_of_the_transport_disturb_nobody(small: System) -> None:
    async with Client(small.address) as client:
        await ready(client)
    before = num_descriptors(small.scheduler), num_descriptors(small.executor)
    assert await asyncio.to_thread(make_noise, small, random.Random(0)) == 500
    await assert_as_before(small, before)
    await assert_pages_are_there(small)


@pytest.mark.slow
async def test_every_call_ends_with_a_status_and_leaves_nothing_for_long(
    small: System, capsys: pytest.CaptureFixture[str]
) -> None:
    async with Client(small.address) as client:
        await ready(client)
    await assault(small, 2, 4000)  # what is allocated once is allocated
    before = num_descriptors(small.scheduler), num_descriptors(small.executor)
    memory_mb = small.scheduler.resident_mb, small.executor.resident_mb
    totals: Counter[tuple[str, grpc.StatusCode | None]] = Counter()
    num_noises = 0
    for seed in range(10):
        attack = await assault(small, 100 + seed, 4000)
        assert attack.wrong == []
        totals += attack.codes
        num_noises += await asyncio.to_thread(make_noise, small, attack.fuzzer.chance)
    await assert_as_before(small, before)
    await assert_pages_are_there(small)
    grown_mb = small.scheduler.resident_mb - memory_mb[0], small.executor.resident_mb - memory_mb[1]
    with capsys.disabled():
        print(
            f"fuzzing, calls: {totals.total()}, connections of noise: {num_noises}, grown by MB: {grown_mb}, "
            f"{dict(sorted(totals.items(), key=str))}"
        )
    assert max(grown_mb) < 30
