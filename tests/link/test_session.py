"""A session against a socket that answers as an executor would."""

import asyncio
import select
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import zmq

from paged.v1 import executor_pb2 as pb
from scheduler_svc.core.plan import Copies, Plan
from scheduler_svc.link.session import MESSAGES_IN_A_TURN, PROTOCOL_VERSION, ExecutorSession, LinkOptions

NUM_PLANS = 50
NOTHING = np.empty(0, np.int32)


def attached() -> pb.ToScheduler:
    ids = np.array([1, 2], "<i4").tobytes()
    lease = pb.Lease(block_ids=ids, row_ids=ids, tokens_per_step=8, plans_in_flight=2)
    model = pb.ModelFacts(block_size=16, max_model_len=100, vocab_size=50)
    return pb.ToScheduler(
        attached=pb.Attached(protocol_version=PROTOCOL_VERSION, epoch=1, session=1, lease=lease, model=model)
    )


def empty_plan(step: int) -> Plan:
    samples = np.empty(0, np.bool_)
    return Plan(step, [], [], [], [], NOTHING, NOTHING, Copies([], [], []), NOTHING, NOTHING, samples)


@asynccontextmanager
async def attached_session() -> AsyncIterator[tuple[Any, bytes, ExecutorSession]]:
    """An executor's socket, the name of its peer there, and the peer."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    session = ExecutorSession(context, LinkOptions(f"tcp://127.0.0.1:{port}", "s", result_timeout_s=60))
    try:
        attaching = asyncio.create_task(session.attach())
        peer, _ = await asyncio.to_thread(router.recv_multipart)
        router.send_multipart([peer, attached().SerializeToString()])
        await attaching
        yield router, peer, session
    finally:
        session.close()
        router.close(0)
        context.destroy(0)


async def test_results_that_keep_coming_leave_turns_to_the_rest_of_the_loop() -> None:
    """Else an executor faster than the scheduler would keep every answer back until all are done."""
    async with attached_session() as (router, peer, session):
        turns, read_in_turns = 0, []
        session.on_result = lambda _result: read_in_turns.append(turns)
        for step in range(1, NUM_PLANS + 1):
            session.send(empty_plan(step))
            result = pb.StepResult(epoch=1, session=1, step=step)
            router.send_multipart([peer, pb.ToScheduler(result=result).SerializeToString()])
        time.sleep(0.2)  # until all have arrived: no turn of the loop meanwhile
        async with asyncio.timeout(20):
            while len(read_in_turns) < NUM_PLANS:
                await asyncio.sleep(0)
                turns += 1
        assert max(read_in_turns.count(turn) for turn in read_in_turns) <= MESSAGES_IN_A_TURN
        assert not session.lost.done()


async def test_what_came_before_the_connection_was_lost_is_read_although_the_loss_is_noticed_first() -> None:
    """Else it would not be known that the executor was lost over this scheduler's plan alone."""
    async with attached_session() as (router, peer, session):
        for _ in range(MESSAGES_IN_A_TURN):
            router.send_multipart([peer, b""])
        begun = pb.Begun(epoch=1, session=1, step=1)
        router.send_multipart([peer, pb.ToScheduler(begun=begun).SerializeToString()])
        router.close(1000)
        # The loop has no turn before the connection is lost; to ask the socket itself would take the news from it.
        assert select.select([session._connection.events_descriptor], [], [], 5)[0]
        async with asyncio.timeout(5):
            await session.lost
        assert session.is_computed_alone
