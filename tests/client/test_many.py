"""Where the answers of one client go that share calls: over servers that do as a test says."""

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import grpc
import grpc.aio
import pytest

from paged.addresses import has_one_address
from paged.channel import SCHEDULER_KEY
from paged.client import Client, PagedClientError, Retries
from paged.load.generator import Load, LoadGenerator
from paged.v1 import inference_pb2, inference_pb2_grpc

RETRIES = Retries(max_attempts=20, first_pause_s=0.01, longest_pause_s=0.02)
SOON_S = 10.0
SLOW_S = 0.2


class Scheduler(inference_pb2_grpc.InferenceServiceServicer):
    """Ends each generation with `code`, at once."""

    def __init__(self) -> None:
        self.code = grpc.StatusCode.OK
        self.num_calls = self.num_messages = self.num_begun = 0
        self.tokens: list[str] = []  # of those that began

    async def GenerateMany(
        self, requests: AsyncIterator[inference_pb2.GenerateManyRequest], context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[inference_pb2.GenerateManyResponse, None]:
        self.num_calls += 1
        async for request in requests:
            self.num_messages += 1
            for action in request.actions:
                self.num_begun += 1
                self.tokens.append(dict(context.invocation_metadata() or ()).get("authorization", ""))
                end = inference_pb2.GenerationEnd(code=self.code.value[0])
                yield inference_pb2.GenerateManyResponse(updates=[{"number": action.number, "end": end}])


class NamedScheduler(Scheduler):
    """Says which it is, as real ones do."""

    def __init__(self) -> None:
        super().__init__()
        self.num_open = 0

    async def GenerateMany(
        self, requests: AsyncIterator[inference_pb2.GenerateManyRequest], context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[inference_pb2.GenerateManyResponse, None]:
        await context.send_initial_metadata(((SCHEDULER_KEY, str(id(self))),))
        self.num_open += 1
        try:
            async for message in super().GenerateMany(requests, context):
                yield message
        finally:
            self.num_open -= 1


class ConfusedScheduler(inference_pb2_grpc.InferenceServiceServicer):
    """Tells of two generations and says the text of one."""

    async def GenerateMany(
        self, requests: AsyncIterator[inference_pb2.GenerateManyRequest], context: object
    ) -> AsyncGenerator[inference_pb2.GenerateManyResponse, None]:
        async for request in requests:
            number = request.actions[0].number
            plain = inference_pb2.PlainUpdates(numbers=[number, 9], texts=["a"], num_tokens=[1, 1])
            yield inference_pb2.GenerateManyResponse(plain=plain)


class OldScheduler(inference_pb2_grpc.InferenceServiceServicer):
    """Of a time before answers could share calls."""

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: object
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        yield inference_pb2.GenerateResponse(text="old", token_ids=[1], finish={})

    async def GenerateMany(self, requests: object, context: grpc.aio.ServicerContext) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "unknown")


async def started(stack: AsyncExitStack, scheduler: inference_pb2_grpc.InferenceServiceServicer) -> str:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(scheduler, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stack.push_async_callback(server.stop, 0)
    return f"127.0.0.1:{port}"


async def connected(
    stack: AsyncExitStack,
    schedulers: Sequence[inference_pb2_grpc.InferenceServiceServicer],
    token_file: Path | None = None,
) -> Client:
    target = "ipv4:" + ",".join([await started(stack, scheduler) for scheduler in schedulers])
    client = Client(target, share_calls=True, retries=RETRIES, token_file=token_file)
    return await stack.enter_async_context(client)


async def ask(client: Client) -> None:
    assert [message async for message in client.generate("hi")] == []


async def test_what_begins_goes_elsewhere_once_a_scheduler_has_said_that_it_serves_nothing() -> None:
    schedulers = Scheduler(), Scheduler()
    async with AsyncExitStack() as stack, asyncio.timeout(SOON_S):
        client = await connected(stack, schedulers)
        await ask(client)
        unable = next(scheduler for scheduler in schedulers if scheduler.num_begun)
        unable.code = grpc.StatusCode.UNAVAILABLE
        for _ in range(50):
            await ask(client)
    assert unable.num_begun < 10


@pytest.mark.parametrize("num_schedulers", [1, 2, 5])
async def test_each_scheduler_has_one_call_and_an_equal_share(num_schedulers: int) -> None:
    schedulers = [NamedScheduler() for _ in range(num_schedulers)]
    async with AsyncExitStack() as stack, asyncio.timeout(SOON_S):
        client = await connected(stack, schedulers)
        await asyncio.gather(*(ask(client) for _ in range(100)))
        while any(scheduler.num_open != 1 for scheduler in schedulers):
            await asyncio.sleep(0.01)
        num_calls = sum(scheduler.num_calls for scheduler in schedulers)
        for _ in range(20):
            await asyncio.gather(*(ask(client) for _ in range(10)))
    shares = [scheduler.num_begun for scheduler in schedulers]
    assert max(shares) <= 1.5 * min(shares)
    assert sum(scheduler.num_calls for scheduler in schedulers) == num_calls <= 2 * num_schedulers + 1


async def test_schedulers_take_turns_where_none_has_fewer_than_others() -> None:
    schedulers = [NamedScheduler() for _ in range(3)]
    async with AsyncExitStack() as stack, asyncio.timeout(SOON_S):
        client = await connected(stack, schedulers)
        await asyncio.gather(*(ask(client) for _ in range(100)))
        while any(scheduler.num_open != 1 for scheduler in schedulers):
            await asyncio.sleep(0.01)
        before = [scheduler.num_begun for scheduler in schedulers]
        for _ in range(30):
            await ask(client)
    assert [scheduler.num_begun - num for scheduler, num in zip(schedulers, before, strict=True)] == [10, 10, 10]


async def test_a_scheduler_whose_call_has_ended_gets_another() -> None:
    schedulers = NamedScheduler(), NamedScheduler()
    async with AsyncExitStack() as stack, asyncio.timeout(SOON_S):
        client = await connected(stack, schedulers)
        await asyncio.gather(*(ask(client) for _ in range(16)))
        schedulers[0].code = grpc.StatusCode.UNAVAILABLE
        await asyncio.gather(*(ask(client) for _ in range(16)))
        schedulers[0].code = grpc.StatusCode.OK
        num_begun = schedulers[0].num_begun
        while schedulers[0].num_begun < num_begun + 10:
            await asyncio.gather(*(ask(client) for _ in range(4)))


@asynccontextmanager
async def slow_to_connect(address: str) -> AsyncIterator[str]:
    """An address that takes SLOW_S to say a first word, and then passes on what comes and goes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(SLOW_S)
        host, _, port = address.rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pass_on(reader, far_writer), pass_on(far_reader, writer))

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def test_answers_of_a_new_client_go_to_all_schedulers_not_to_the_one_that_is_connected_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paged.many.FIRST_S", 8 * SLOW_S)
    schedulers = Scheduler(), Scheduler()
    async with AsyncExitStack() as stack, asyncio.timeout(SOON_S):
        first, other = [await started(stack, scheduler) for scheduler in schedulers]
        slow = await stack.enter_async_context(slow_to_connect(other))
        client = await stack.enter_async_context(Client(f"ipv4:{first},{slow}", share_calls=True, retries=RETRIES))
        await asyncio.gather(*(ask(client) for _ in range(16)))
    assert all(scheduler.num_begun for scheduler in schedulers)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("10.0.0.1:50051", True),
        ("[::1]:50051", True),
        ("ipv4:10.0.0.1:50051", True),
        ("dns:///10.0.0.1:50051", True),
        ("unix:/run/paged", True),
        ("ipv4:10.0.0.1:50051,10.0.0.2:50051", False),
        ("scheduler:50051", False),
        ("localhost:50051", False),
        ("dns:///scheduler:50051", False),
    ],
)
def test_a_target_has_one_address_where_it_says_so(target: str, expected: bool) -> None:
    assert has_one_address(target) == expected


async def test_what_begins_after_the_token_has_changed_shares_no_call_of_the_one_before(
    tmp_path: Path,
) -> None:
    scheduler, token_file = Scheduler(), tmp_path / "token"
    token_file.write_text("before")
    async with AsyncExitStack() as stack, asyncio.timeout(SOON_S):
        client = await connected(stack, [scheduler], token_file)
        await ask(client)
        token_file.write_text("after")
        while client._token.metadata != (("authorization", "Bearer after"),):
            await asyncio.sleep(0.01)
        await ask(client)
    assert scheduler.tokens == ["Bearer before", "Bearer after"]


async def test_with_a_scheduler_that_knows_no_such_calls_each_answer_has_its_own() -> None:
    async with AsyncExitStack() as stack, asyncio.timeout(SOON_S):
        address = await started(stack, OldScheduler())
        client = await stack.enter_async_context(Client(address, share_calls=True))
        assert [message.text async for message in client.generate("hi")] == ["old"]


async def test_an_answer_that_is_to_be_asked_again_once_its_client_is_closed_says_so() -> None:
    scheduler = Scheduler()
    scheduler.code = grpc.StatusCode.UNAVAILABLE
    async with AsyncExitStack() as stack, asyncio.timeout(SOON_S):
        client = await connected(stack, [scheduler])
        asking = asyncio.create_task(ask(client))
        while not scheduler.num_begun:
            await asyncio.sleep(0)
        await client.close()
        with pytest.raises(RuntimeError, match="the client is closed"):
            await asking


async def test_a_client_that_is_closed_looks_for_no_schedulers() -> None:
    failures: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    client = Client("ipv4:127.0.0.1:1,127.0.0.1:2", share_calls=True)
    await client.close()
    with pytest.raises(RuntimeError, match="closed"):
        await ask(client)
    del client
    gc.collect()
    assert not failures


@pytest.mark.parametrize("prompt_tokens", [(8, 8), (120_000, 120_000)])
async def test_in_a_load_each_answer_has_its_own_where_such_calls_do_not_take_it(
    prompt_tokens: tuple[int, int],
) -> None:
    async with AsyncExitStack() as stack, asyncio.timeout(SOON_S):
        address = await started(stack, OldScheduler())
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        load = Load(address, 3, prompt_tokens=prompt_tokens, once=True, share_calls=True)
        generator = await stack.enter_async_context(LoadGenerator(load, channel))
        generator.begin()
        await generator.finished()
        seen = generator.end()
    assert (seen.sent, seen.finished) == (3, 3)


async def test_what_begins_at_once_leaves_in_few_messages() -> None:
    scheduler = Scheduler()
    async with AsyncExitStack() as stack, asyncio.timeout(SOON_S):
        client = await connected(stack, [scheduler])
        await asyncio.gather(*(ask(client) for _ in range(96)))
    assert scheduler.num_begun == 96
    assert scheduler.num_messages < 24


async def test_a_message_that_contradicts_itself_ends_the_answers_of_its_call() -> None:
    async with AsyncExitStack() as stack, asyncio.timeout(SOON_S):
        client = await connected(stack, [ConfusedScheduler()])
        with pytest.raises(PagedClientError, match="contradicts itself"):
            _ = [message async for message in client.generate("hi")]
