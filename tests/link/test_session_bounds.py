"""What a session takes of an executor has bounds: silence, and what comes before its time."""

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import zmq

from paged.v1 import executor_pb2 as pb
from scheduler_svc.link import session as session_module
from scheduler_svc.link.session import MAX_EARLY_CHANGES, ExecutorSession, LinkOptions, SessionLost
from tests.link.test_session import attached
from tests.processes import free_port
from tests.system.network import Clock
from tests.zmtp import send_until_cut, shake_hands

SILENCE_S = 0.2


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The session's own. It still looks at it as often as time goes by."""
    clock = Clock(1000.0)
    monkeypatch.setattr(session_module, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(session_module, "ATTACH_SILENCE_S", SILENCE_S)
    return clock


@dataclass
class Attaching:
    """A session that has asked for a lease, and the socket that it has asked."""

    session: ExecutorSession
    router: zmq.Socket
    peer: bytes
    task: asyncio.Task

    def say(self, **message: object) -> None:
        self.router.send_multipart([self.peer, pb.ToScheduler(**message).SerializeToString()])


@pytest.fixture
async def attaching() -> AsyncIterator[Attaching]:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    session = ExecutorSession(context, LinkOptions(f"tcp://127.0.0.1:{port}", "s", result_timeout_s=60))
    task = asyncio.create_task(session.attach())
    peer, _ = await asyncio.to_thread(router.recv_multipart)
    yield Attaching(session, router, peer, task)
    task.cancel()
    session.close()
    router.close(0)
    context.destroy(0)


async def test_an_executor_that_says_nothing_at_all_is_given_up(clock: Clock, attaching: Attaching) -> None:
    while attaching.session._heard_at is None:
        await asyncio.sleep(0)
    clock.now += SILENCE_S
    async with asyncio.timeout(20):
        with pytest.raises(SessionLost, match="has said nothing for"):
            await attaching.task


async def test_a_lease_is_waited_for_as_long_as_the_executor_says_that_it_is_there(
    clock: Clock, attaching: Attaching
) -> None:
    async with asyncio.timeout(20):
        for _ in range(10):
            clock.now += 0.9 * SILENCE_S
            attaching.say()
            while attaching.session._heard_at != clock.now:
                await asyncio.sleep(0.001)
        attaching.say(attached=attached().attached)
        await attaching.task


async def test_an_executor_that_is_not_there_yet_is_waited_for_without_end(clock: Clock) -> None:
    context = zmq.Context()
    session = ExecutorSession(context, LinkOptions(f"tcp://127.0.0.1:{free_port()}", "s", result_timeout_s=60))
    task = asyncio.create_task(session.attach())
    clock.now += 1e6
    done, _ = await asyncio.wait([task], timeout=3 * SILENCE_S)
    assert not done
    task.cancel()
    session.close()
    context.destroy(0)


async def test_a_lease_that_changes_before_it_is_there_ends_the_session(attaching: Attaching) -> None:
    attaching.say(lease_change=pb.LeaseChange(epoch=1, session=1))
    async with asyncio.timeout(20):
        with pytest.raises(SessionLost, match="malformed message from the executor: the lease is not there"):
            await attaching.task


async def test_changes_of_a_lease_that_nobody_follows_yet_are_kept_up_to_a_number(attaching: Attaching) -> None:
    attaching.say(attached=attached().attached)
    session, seen = attaching.session, []
    async with asyncio.timeout(20):
        await attaching.task
        for number in range(MAX_EARLY_CHANGES):
            attaching.say(lease_change=pb.LeaseChange(epoch=1, session=1, granted_tokens_per_step=number))
        while len(session._early_changes) < MAX_EARLY_CHANGES:
            await asyncio.sleep(0.001)
        session.follow_lease(lambda change: seen.append(change.granted_tokens_per_step))
        assert seen == list(range(MAX_EARLY_CHANGES))
        assert not session.lost.done()
        session._on_lease_change = None
        for _ in range(MAX_EARLY_CHANGES + 1):
            attaching.say(lease_change=pb.LeaseChange(epoch=1, session=1))
        assert "16 changes of it are" in str(await session.lost)


async def test_a_message_of_several_parts_ends_the_session(attaching: Attaching) -> None:
    attaching.router.send_multipart([attaching.peer, attached().SerializeToString(), b""])
    async with asyncio.timeout(20):
        with pytest.raises(SessionLost, match="it has several parts"):
            await attaching.task


async def test_a_message_without_an_end_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it could be read before its end."""
    monkeypatch.setattr(session_module, "MAX_MESSAGE_BYTES", 1 << 20)
    context = zmq.Context()
    with socket.create_server(("127.0.0.1", 0)) as server:
        options = LinkOptions(f"tcp://127.0.0.1:{server.getsockname()[1]}", "s", result_timeout_s=60)
        session = ExecutorSession(context, options)

        def lie() -> None:
            connection, _ = server.accept()
            with connection:
                shake_hands(connection, b"ROUTER")
                send_until_cut(connection, bytes(1000))

        lying = asyncio.create_task(asyncio.to_thread(lie))
        async with asyncio.timeout(60):
            with pytest.raises(SessionLost, match="1048576 bytes of the executor were no whole message"):
                await session.attach()
            session.close()
            await lying
    context.destroy(0)
