"""Without credentials no method of the server can be reached."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from paged.client import Client, PermissionDeniedError, UnauthenticatedError
from paged.roles import Role
from scheduler_svc.api.permissions import OPEN_METHODS, ROLES
from scheduler_svc.api.server import ApiServer
from scheduler_svc.core.tenants import TenantLimits, Tenants
from scheduler_svc.settings import SchedulerSettings
from tests.api.scripted_engine import ScriptedEngine
from tests.security.calls import Method, bearer, channel_to, methods_of, status_of
from tests.security.keys import Keys

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
DENIED = grpc.StatusCode.PERMISSION_DENIED
SOON_S = 15.0


@pytest.fixture
async def channel(address: str, keys: Keys) -> AsyncIterator[grpc.aio.Channel]:
    """With the certificate that the server asks for."""
    async with channel_to(address, keys.credentials) as connected:
        yield connected


@pytest.fixture
async def methods(channel: grpc.aio.Channel, keys: Keys) -> list[Method]:
    found = await methods_of(channel, bearer(keys.operator))
    assert len(found) >= 12
    return found


def client_of(address: str, keys: Keys, token: str | None) -> Client:
    return Client(address, credentials=keys.credentials, token=token)


async def test_every_method_has_its_roles_written_down(methods: list[Method]) -> None:
    named = {method.path for method in methods}
    assert named <= ROLES.keys() | OPEN_METHODS
    assert named & OPEN_METHODS == OPEN_METHODS  # and none is open that is not there


@pytest.mark.parametrize("stranger", ["nothing", "another scheme", "a wrong token", "an expired token", "two tokens"])
async def test_no_method_answers_a_stranger(
    stranger: str, channel: grpc.aio.Channel, methods: list[Method], keys: Keys, engine: ScriptedEngine
) -> None:
    expired = keys.token("late", "--days", "0", "--role", "generate", "--role", "read", "--role", "control")
    metadata = {
        "nothing": (),
        "another scheme": (("authorization", f"Basic {keys.operator}"),),
        "a wrong token": bearer(keys.operator[:-1] + "!"),
        "an expired token": bearer(expired),
        "two tokens": bearer(keys.operator) * 2,
    }[stranger]
    if stranger == "an expired token":
        await until_known(channel, expired)
    for method in methods:
        code, details = await status_of(channel, method, metadata)
        if method.path in OPEN_METHODS:
            assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNIMPLEMENTED), (method, details)
        else:
            assert code is UNAUTHENTICATED, (method, code, details)
            assert keys.operator not in details
    assert engine.submitted == []


async def until_known(channel: grpc.aio.Channel, token: str, wanted: str = "the token has expired") -> None:
    """Until the server says this of the token: it looks at its file now and then."""
    load = Method("/paged.v1.ControlService/GetLoad", False, False)
    async with asyncio.timeout(SOON_S):
        while (await status_of(channel, load, bearer(token)))[1] != wanted:
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("credentials", ["no certificate", "a certificate of others", "no encryption", "another root"])
async def test_no_method_answers_whom_the_transport_does_not_let_in(
    credentials: str, address: str, methods: list[Method], keys: Keys, tmp_path: Path, engine: ScriptedEngine
) -> None:
    others = Keys.make(tmp_path / "others")
    shown = {
        "no certificate": keys.root_only,
        "no encryption": None,
        "a certificate of others": grpc.ssl_channel_credentials(
            *((keys.tls / "ca.pem").read_bytes(), (others.tls / "client-key.pem").read_bytes()),
            (others.tls / "client.pem").read_bytes(),
        ),
        "another root": others.credentials,
    }[credentials]
    async with channel_to(address, shown) as channel:
        for method in methods:
            code, _ = await status_of(channel, method, bearer(keys.operator))
            assert code is grpc.StatusCode.UNAVAILABLE, method
    assert engine.submitted == []


@pytest.mark.parametrize("role", list(Role))
async def test_a_role_opens_its_methods_and_no_others(
    role: Role, channel: grpc.aio.Channel, methods: list[Method], keys: Keys
) -> None:
    token = keys.token("one", "--role", role.value)
    await until_known(
        channel, token, "" if role is Role.READ else "the token has no role that may call GetLoad; it takes read"
    )
    for method in methods:
        code, details = await status_of(channel, method, bearer(token))
        if method.path in OPEN_METHODS or role in ROLES[method.path]:
            assert code not in (DENIED, UNAUTHENTICATED), (method, details)
        else:
            assert code is DENIED, (method, code, details)


async def test_a_method_that_nobody_has_thought_of_is_for_control_alone(channel: grpc.aio.Channel, keys: Keys) -> None:
    unknown = Method("/paged.v2.FutureService/Do", False, False)
    reader = keys.token("reader", "--role", "read", "--role", "generate")
    await until_known(channel, reader, "")
    assert (await status_of(channel, unknown))[0] is UNAUTHENTICATED
    assert (await status_of(channel, unknown, bearer(reader)))[0] is DENIED
    assert (await status_of(channel, unknown, bearer(keys.operator)))[0] is grpc.StatusCode.UNIMPLEMENTED


async def test_the_request_of_a_stranger_is_not_read(channel: grpc.aio.Channel, settings: SchedulerSettings) -> None:
    """A message that is too large would be told so; to a stranger it is not."""
    generate = Method("/paged.v1.InferenceService/Generate", False, True)
    large = bytes(settings.max_message_bytes + 1)
    assert (await status_of(channel, generate, (), large))[0] is UNAUTHENTICATED


async def test_whose_request_it_is_follows_from_the_token(address: str, keys: Keys, engine: ScriptedEngine) -> None:
    shop, anybody = keys.token("shop", "--tenant", "shop"), keys.token("anybody")
    async with channel_to(address, keys.credentials) as channel:
        await until_known(channel, anybody, "the token has no role that may call GetLoad; it takes read")
    async with client_of(address, keys, shop) as client:
        await client.complete("hi")
        await client.complete("hi", tenant="shop")
        with pytest.raises(PermissionDeniedError, match="tenant: is not the token's own, 'shop'"):
            await client.complete("hi", tenant="bank")
    async with client_of(address, keys, anybody) as client:
        await client.complete("hi")
        await client.complete("hi", tenant="bank")
    assert [request.tenant for request in engine.submitted] == ["shop", "shop", "", "bank"]


async def test_tokens_come_and_go_with_the_file_and_a_bad_file_changes_nothing(
    address: str, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    new = keys.token("new", "--role", "read")
    async with channel_to(address, keys.credentials) as channel:
        await until_known(channel, new, "")
        good = keys.token_file.read_text()
        keys.token_file.write_text(good + f'\n[[tokens]]\nname = "plain"\nsha256 = "{keys.operator}"\n')
        async with asyncio.timeout(SOON_S):
            while "tokens_not_reloaded" not in (said := capsys.readouterr().out):
                await until_known(channel, new, "")
        assert keys.operator not in said
        assert "tokens.2.sha256" in said
        keys.token_file.write_text("")
        await until_known(channel, new, "the token is not known")
        await until_known(channel, keys.operator, "the token is not known")


async def test_what_tenants_may_have_follows_the_file(address: str, keys: Keys, engine: ScriptedEngine) -> None:
    engine.tenants = Tenants({"shop": TenantLimits(9, 99, 2.0)}, TenantLimits(5, 55))
    good = keys.token_file.read_text()
    for said, wanted in (
        ("weight = 3.0\nmax_requests = 2", TenantLimits(2, 99, 3.0)),
        ("max_queued_tokens = 7", TenantLimits(9, 7, 2.0)),
    ):
        keys.token_file.write_text(f'{good}\n[[tenants]]\nname = "shop"\n{said}\n')
        async with channel_to(address, keys.credentials) as channel, asyncio.timeout(SOON_S):
            while engine.tenants.limits("shop") != wanted:
                await status_of(
                    channel, Method("/paged.v1.ControlService/GetLoad", False, False), bearer(keys.operator)
                )
    assert engine.tenants.limits("bank") == TenantLimits(5, 55)


async def test_a_new_certificate_is_shown_to_new_connections_and_a_bad_one_is_not(
    address: str, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = Keys.make(tmp_path / "others")
    load = Method("/paged.v1.ControlService/GetLoad", False, False)

    async def load_with(credentials: grpc.ChannelCredentials) -> grpc.StatusCode:
        async with channel_to(address, credentials) as channel:
            return (await status_of(channel, load, bearer(keys.operator)))[0]

    async with channel_to(address, keys.credentials) as standing:
        assert (await status_of(standing, load, bearer(keys.operator)))[0] is grpc.StatusCode.OK
        (keys.tls / "server-key.pem").write_bytes((others.tls / "server-key.pem").read_bytes())  # half of it
        said = ""
        async with asyncio.timeout(SOON_S):
            while "certificates_not_reloaded" not in said:
                assert await load_with(keys.credentials) is grpc.StatusCode.OK
                said += capsys.readouterr().out
        assert "server-key.pem" in said
        for name in ("ca.pem", "server.pem"):
            (keys.tls / name).write_bytes((others.tls / name).read_bytes())
        async with asyncio.timeout(SOON_S):
            while await load_with(others.credentials) is not grpc.StatusCode.OK:
                await asyncio.sleep(0.05)
        assert (await status_of(standing, load, bearer(keys.operator)))[0] is grpc.StatusCode.OK


async def test_an_authority_stands_for_the_address(address: str, keys: Keys) -> None:
    for authority in ("scheduler.test", None):
        async with Client(address, credentials=keys.credentials, token=keys.operator, authority=authority) as client:
            assert (await client.complete("hi")).text == "Once!"
    async with Client(
        f"ipv4:{address}",
        credentials=keys.credentials,
        token_file=keys.directory / "operator.token",
        authority="localhost",
    ) as client:
        assert (await client.complete("hi")).text == "Once!"


async def test_a_client_is_told_in_its_own_exceptions(address: str, keys: Keys) -> None:
    async with client_of(address, keys, "paged_unknown") as client:
        with pytest.raises(UnauthenticatedError) as caught:
            await client.complete("hi")
    assert caught.value.reason == "UNAUTHENTICATED"
    assert "paged_unknown" not in str(caught.value)


@pytest.mark.parametrize("reflection", [True, False])
async def test_reflection_can_be_closed(engine: ScriptedEngine, reflection: bool) -> None:
    server = ApiServer(engine, SchedulerSettings(listen_address="127.0.0.1:0", reflection=reflection))
    async with channel_to(await server.start(), None) as channel:
        info = Method("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", True, True)
        code, _ = await status_of(channel, info)
    await server.stop(0.1)
    assert (code is grpc.StatusCode.UNIMPLEMENTED) != reflection
