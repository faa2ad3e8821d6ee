"""What a call of GenerateMany takes and says, without a network: nothing that a client does makes it grow."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import cast

from paged.v1 import inference_pb2
from scheduler_svc.api.call_limits import CallLimits
from scheduler_svc.api.deadline import Deadline
from scheduler_svc.api.engine_face import Engine
from scheduler_svc.api.generate_many import FULL_BYTES, MAX_UNTOLD_ENDS, ManyGenerations
from scheduler_svc.delivery import Delivery
from scheduler_svc.errors import FieldViolation, InvalidRequest
from scheduler_svc.gathering import Gathering
from scheduler_svc.requests import GenerationRequest
from scheduler_svc.settings import SchedulerSettings

NUM_REQUESTS = 8 * MAX_UNTOLD_ENDS
LARGEST_END_BYTES = 5000


class Idle:
    """As much of an engine as requests see that are all refused."""

    def gathering(self) -> Gathering:
        delivery = Delivery(
            max_unread_bytes=1, max_total_unread_bytes=1, take=lambda _answer: None, fail=lambda _id, _error: None
        )
        return Gathering(delivery)


def begun(number: int) -> inference_pb2.GenerationAction:
    return inference_pb2.GenerationAction(number=number, generate=inference_pb2.GenerateRequest())


class Requests:
    """Of one client, which has many. `num_taken` of them are with the scheduler."""

    def __init__(self) -> None:
        self.num_taken = 0

    async def __aiter__(self) -> AsyncIterator[inference_pb2.GenerateManyRequest]:
        for number in range(NUM_REQUESTS):
            self.num_taken += 1
            yield inference_pb2.GenerateManyRequest(actions=[begun(number)])
            await asyncio.sleep(0)


async def refuse(_request: object, _deadline: Deadline) -> GenerationRequest:
    raise InvalidRequest(*(FieldViolation("x" * 64, "y" * 160) for _ in range(16)))


def refusing(requests: Requests) -> AsyncGenerator[inference_pb2.GenerateManyResponse, None]:
    limits = CallLimits(SchedulerSettings())
    return ManyGenerations(cast(Engine, Idle()), refuse, limits, 60.0).messages(aiter(requests))


async def turns_for_others() -> None:
    for _ in range(4 * MAX_UNTOLD_ENDS):
        await asyncio.sleep(0)


async def test_who_reads_nothing_of_what_is_refused_is_heard_no_further() -> None:
    requests = Requests()
    messages = refusing(requests)
    told = [update.number for update in (await anext(messages)).updates]
    last = -1
    while requests.num_taken != last:  # until it takes no more
        last = requests.num_taken
        await turns_for_others()
    assert last < 2 * MAX_UNTOLD_ENDS
    told += [update.number async for message in messages for update in message.updates]
    assert sorted(told) == list(range(NUM_REQUESTS))


async def test_no_message_of_refusals_is_larger_than_a_message_of_answers() -> None:
    sizes, told = [], []
    async for message in refusing(Requests()):
        sizes.append(message.ByteSize())
        told += [update.number for update in message.updates]
        await turns_for_others()  # in which more are refused
    assert sorted(told) == list(range(NUM_REQUESTS))
    assert max(sizes) < FULL_BYTES + LARGEST_END_BYTES


async def test_nothing_begins_any_more_once_the_call_is_over() -> None:
    """Of a message with many actions, too."""
    num_begun = 0

    async def count_and_refuse(request: object, deadline: Deadline) -> GenerationRequest:
        nonlocal num_begun
        num_begun += 1
        return await refuse(request, deadline)

    async def requests() -> AsyncIterator[inference_pb2.GenerateManyRequest]:
        yield inference_pb2.GenerateManyRequest(actions=map(begun, range(NUM_REQUESTS)))

    limits = CallLimits(SchedulerSettings())
    messages = ManyGenerations(cast(Engine, Idle()), count_and_refuse, limits, 60.0).messages(requests())
    await anext(messages)
    await turns_for_others()
    await messages.aclose()
    begun_before = num_begun
    await turns_for_others()
    assert begun_before == num_begun < NUM_REQUESTS
