"""Calls that are going on end once their token has expired, is taken back or changed; those of others go on."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paged.client import Client, PagedClientError, PermissionDeniedError, UnauthenticatedError, generate_request
from paged.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc
from scheduler_svc.api.server import ApiServer
from scheduler_svc.settings import parse_settings
from tests.api.scripted_engine import ScriptedEngine, forever
from tests.security.calls import bearer, channel_to
from tests.security.keys import Keys
from tests.security.test_callers import until_known
from tests.system.conftest import System
from tests.system.requests import idle_load, ready
from tests.system.test_delivery import SMALL_WINDOW, read_to_the_end

EndOf = Callable[[Keys], None]
SOON_S = 30.0


@pytest.fixture
async def channel(address: str, keys: Keys) -> AsyncIterator[grpc.aio.Channel]:
    async with channel_to(address, keys.credentials) as connected:
        yield connected


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SOON_S):
        while not condition():
            await asyncio.sleep(0.01)


def rewrite(keys: Keys, pattern: str, replacement: str) -> None:
    """Of the entry of the token that is called shop."""
    before, entry = re.split(r'(?=\[\[tokens\]\]\nname = "shop")', keys.token_file.read_text())
    changed = re.sub(pattern, replacement, entry, flags=re.DOTALL)
    assert changed != entry
    keys.token_file.write_text(before + changed)


def expiring(keys: Keys) -> None:
    rewrite(keys, r"\Z", f"\nexpires = {(datetime.now(UTC) + timedelta(seconds=1.5)).isoformat()}\n")


ENDS: dict[str, tuple[EndOf, type[PagedClientError], str]] = {
    "removed": (lambda keys: rewrite(keys, ".*", ""), UnauthenticatedError, "the token is not known"),
    "replaced": (lambda keys: rewrite(keys, "[0-9a-f]{64}", "0" * 64), UnauthenticatedError, "the token is not known"),
    "expired": (expiring, UnauthenticatedError, "the token has expired"),
    "without its role": (
        lambda keys: rewrite(keys, r"roles = \[.*?\]", 'roles = ["read"]'),
        PermissionDeniedError,
        "no role that may call Generate",
    ),
    "another tenant's": (
        lambda keys: rewrite(keys, 'tenant = "shop"', 'tenant = "bank"'),
        PermissionDeniedError,
        "another tenant's by now",
    ),
}


@pytest.mark.parametrize("how", ENDS)
async def test_a_call_ends_with_its_token_and_others_go_on(
    how: str,
    address: str,
    channel: grpc.aio.Channel,
    keys: Keys,
    engine: ScriptedEngine,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change, kind, reason = ENDS[how]
    go_on = asyncio.Event()
    engine.script.insert(1, go_on.wait)  # when something has been said
    shop = keys.token("shop", "--tenant", "shop", "--role", "generate")
    await until_known(channel, shop, "the token has no role that may call GetLoad; it takes read")
    async with (
        Client(address, credentials=keys.credentials, token=shop) as of_shop,
        Client(address, credentials=keys.credentials, token=keys.operator) as operator,
    ):
        others = asyncio.create_task(operator.complete("hi"))
        await until(lambda: engine.submitted)
        streaming, whole = (asyncio.create_task(each) for each in (read(of_shop), of_shop.complete("hi")))
        await until(lambda: len(engine.live) == 3)
        change(keys)
        for call in (streaming, whole):
            with pytest.raises(kind, match=reason):
                await asyncio.wait_for(call, SOON_S)
        await until(lambda: len(engine.live) == 1)
        assert not others.done()
        go_on.set()
        assert (await others).text == "Once!"
    said = capsys.readouterr().out
    assert "calls_ended" in said
    assert shop not in said


async def read(client: Client) -> None:
    async for _ in client.generate("hi"):
        pass


async def test_whatever_is_going_on_ends(channel: grpc.aio.Channel, keys: Keys, engine: ScriptedEngine) -> None:
    """Streams of other services than the one that generates, whether they have something to say or not."""
    shop = keys.token("shop", "--role", "read", "--role", "control")
    control: Any = control_pb2_grpc.ControlServiceStub(channel)
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = asyncio.Event()

    async def silent() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        yield reflection_pb2.ServerReflectionRequest(list_services="*")
        asked.set()
        await forever()

    show = {"metadata": bearer(shop)}
    await until_known(channel, shop, "")
    often = control.Watch(control_pb2.WatchRequest(period_ms=100), **show)
    calls = [often, reflection.ServerReflectionInfo(silent(), **show)]
    for call in calls:
        assert await call.read() is not grpc.aio.EOF
    rewrite(keys, ".*", "")
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(read_to_the_end(call), SOON_S)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_the_block_map_page_shows_no_more(keys: Keys, engine: ScriptedEngine) -> None:
    shop = keys.token("shop", "--role", "read")
    flags = ["--listen-address", "127.0.0.1:0", "--block-map-address", "127.0.0.1:0"]
    server = ApiServer(engine, parse_settings([*flags, "--token-file", str(keys.token_file)]))
    await server.start()
    url, show = f"http://{server.block_map_address}/watch?period_ms=100", {"Authorization": f"Bearer {shop}"}
    try:
        async with aiohttp.ClientSession(headers=show) as http, http.get(url) as watched:
            assert (await watched.content.readline()).startswith(b"data: ")
            rewrite(keys, ".*", "")
            async with asyncio.timeout(SOON_S):
                await watched.content.read()  # until it ends
            async with http.get(url) as again:
                assert again.status == 401
    finally:
        await server.stop(0.1)


async def test_nothing_of_them_is_computed_any_more_though_a_reader_takes_nothing(
    system: System, keys: Keys, tmp_path: Path
) -> None:
    shop = keys.token("shop", "--role", "generate")
    system.executor_flags = ["--max-rows", "2", "--simulate-fixed-us", "2000"]
    system.scheduler_flags = [*keys.scheduler_flags, "--max-unread-bytes", str(1 << 30)]
    system.start()
    request = generate_request([300] * 8, max_tokens=3900, ignore_eos=True, logprobs=20)
    narrow = grpc.aio.secure_channel(system.address, keys.credentials, options=SMALL_WINDOW)
    async with Client(system.address, credentials=keys.credentials, token=keys.operator) as operator, narrow as channel:
        await ready(operator)
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        calls = [stub.Generate(request, metadata=bearer(shop)) for _ in range(4)]
        async with asyncio.timeout(SOON_S):
            while (load := await operator.load()).unread_bytes < 1 << 16 or load.waiting_sequences < 2:
                await asyncio.sleep(0.01)
        rewrite(keys, ".*", "")
        load = await idle_load(operator)
        assert (load.used_blocks, load.unread_bytes) == (0, 0)
        assert (load.finished_requests, load.cancelled_requests) == (0, 4)
        for call in calls:
            call.cancel()
        assert len((await operator.complete([300] * 8, max_tokens=20, ignore_eos=True)).token_ids) == 20
