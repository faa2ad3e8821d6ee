"""The control stream: what is told of requests and blocks is what the books say; changes add up."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from paged.client import (
    Client,
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from paged.v1 import control_pb2
from paged.watched import HELD_BY_NONE, BlockStates, counts_of
from tests.processes import Service, cleaned_up, start_executor
from tests.security.keys import run_keys
from tests.watch.conftest import NUM_BLOCKS, Watched, answering

PROMPT = list(range(300, 340))  # two blocks and a half
LiveRequest = control_pb2.LiveRequest
Holds = Callable[[control_pb2.WatchResponse], bool]


async def messages(client: Client, period_ms: int = 100, **options: int) -> AsyncIterator[control_pb2.WatchResponse]:
    async with aclosing(client.watch(period_ms=period_ms, **options)) as told:
        async for message in told:
            yield message


async def until(client: Client, holds: Holds, **options: int) -> tuple[control_pb2.WatchResponse, BlockStates]:
    """The first message of which this holds, and the blocks as told up to it."""
    states = BlockStates()
    async with asyncio.timeout(30), aclosing(messages(client, **options)) as told:
        async for message in told:
            states.apply(message)
            if holds(message):
                return message, states
    raise AssertionError("the stream ended")


async def test_a_first_message_tells_all_and_the_next_only_changes(watched: Watched) -> None:
    async with aclosing(messages(watched.client)) as told:
        first, second = await anext(told), await anext(told)
    (executor,) = first.executors
    assert executor.endpoint == watched.endpoint
    assert (executor.block_size, executor.lent_blocks, executor.most_blocks) == (16, NUM_BLOCKS - 1, NUM_BLOCKS - 1)
    assert sum(len(run.states) for run in executor.runs) == NUM_BLOCKS - 1
    assert not first.HasField("rates")
    assert second.rates.period_ms >= 50
    assert second.executors[0].runs == []
    assert second.executors[0].num_blocks == NUM_BLOCKS


async def test_what_is_told_of_blocks_adds_up_to_the_books(watched: Watched) -> None:
    states, met = BlockStates(), set()
    async with (
        answering(watched.client, "a", PROMPT, max_tokens=400),
        answering(watched.client, "b", PROMPT[:32] + [9] * 9, max_tokens=60),
        aclosing(messages(watched.client)) as told,
    ):
        async for message in told:
            states.apply(message)
            told_states = states.of[watched.endpoint]
            # The stream is made in this process: between its making and now a step may have been taken in.
            (executor,) = message.executors
            counts = counts_of(told_states)
            assert counts[1:] == (
                executor.blank_blocks,
                executor.cached_blocks,
                executor.used_blocks,
                executor.shared_blocks,
            )
            assert counts.blank + counts.cached + counts.used == executor.lent_blocks
            met.add(tuple(request.request_id for request in message.requests))
            if met >= {("a", "b"), ("a",)}:
                break
        now, then = watched.counts(), told_states
        assert {block for block in now if then[block] != HELD_BY_NONE + now[block]} <= set(list(now)[-3:])
    await watched.idle()
    _, states = await until(watched.client, lambda message: not message.requests)
    assert counts_of(states.of[watched.endpoint]).used == 0
    assert counts_of(states.of[watched.endpoint]).cached > 2  # the prompt's blocks, at least


async def test_requests_are_told_by_where_they_stand_without_a_word_of_them(watched: Watched) -> None:
    many, began = {f"waits-{i}": [700 + i] * 100 for i in range(3)}, time.perf_counter()
    async with answering(watched.client, "samples", PROMPT, max_tokens=300, n=12, priority=3, tenant="shop"):
        waiting = [
            asyncio.create_task(watched.client.complete(prompt, request_id=name, max_tokens=1500))
            for name, prompt in many.items()
        ]
        message, _ = await until(watched.client, lambda message: message.num_requests == 4)
        short, _ = await until(watched.client, lambda message: message.num_requests == 4, max_requests=2)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    first = message.requests[0]
    assert first.request_id == "samples"
    assert (first.tenant, first.priority, first.sequences, first.running_sequences) == ("shop", 3, 12, 12)
    assert (first.prompt_tokens, first.state, first.model) == (40, LiveRequest.STATE_DECODE, "simulated")
    assert first.generated_tokens >= 12
    assert 0 < first.age_ms <= (time.perf_counter() - began) * 1000
    assert first.table_blocks >= 36
    assert first.executor == watched.endpoint
    assert sorted(request.request_id for request in message.requests[1:]) == sorted(many)
    states = [request.state for request in message.requests]
    assert states == sorted(states, key=lambda state: state == LiveRequest.STATE_WAITING)
    assert short.requests[0].request_id == "samples"
    assert len(short.requests) == 2
    assert message.executors[0].copies >= 11  # all but one of the samples copy the half block
    assert message.executors[0].shared_blocks >= 2


async def test_a_table_is_told_on_demand_with_the_counts_of_its_blocks(watched: Watched) -> None:
    async with answering(watched.client, "two", PROMPT, max_tokens=300, n=2):
        told = await watched.client.block_tables("two")
        counts = watched.counts()
    assert [table.index for table in told.tables] == [0, 1]
    for table in told.tables:
        assert len(table.blocks) * 16 >= table.computed_tokens >= 40
        assert table.blocks[:2] == told.tables[0].blocks[:2]
        assert list(table.counts[:3]) == [2, 2, 1]
        assert [counts[block] for block in table.blocks[:3]] == list(table.counts[:3])
    assert told.request.request_id == "two"
    with pytest.raises(NotFoundError, match="no live request is called 'another'"):
        await watched.client.block_tables("another")


async def test_the_prefix_tree_is_told_by_hashes(watched: Watched) -> None:
    for tail in ([1] * 17, [2] * 33):
        await watched.client.complete([5] * 32 + tail, max_tokens=1, temperature=0)
    tree = await watched.client.prefix_tree()
    assert tree.executor == watched.endpoint
    assert tree.num_blocks == len(tree.blocks) == 5
    assert [(block.parent, block.depth) for block in tree.blocks] == [(0, 0), (1, 1), (2, 2), (3, 3), (2, 2)]
    assert len({block.hash for block in tree.blocks}) == 5
    assert [len((await watched.client.prefix_tree(max_blocks=n)).blocks) for n in (1, 3)] == [1, 3]
    with pytest.raises(NotFoundError, match=r"no executor 'tcp://other:1'; tcp://"):
        await watched.client.prefix_tree("tcp://other:1")


@pytest.mark.parametrize(
    ("field", "options"),
    [("period_ms", {"period_ms": 99}), ("period_ms", {"period_ms": 60_001}), ("max_requests", {"max_requests": 1001})],
)
async def test_what_cannot_be_asked_for_is_named(watched: Watched, field: str, options: dict[str, int]) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        await anext(watched.client.watch(**options))
    with pytest.raises(InvalidRequestError, match="max_blocks"):
        await watched.client.prefix_tree(max_blocks=10_001)


async def test_an_executor_that_comes_back_is_told_from_the_beginning(
    watched: Watched, executor: Service, tmp_path: Path
) -> None:
    states, sessions = BlockStates(), []
    await watched.client.complete(PROMPT, max_tokens=1)
    with cleaned_up([]) as services:
        async with asyncio.timeout(60), aclosing(messages(watched.client)) as told:
            async for message in told:
                states.apply(message)
                session, column = message.executors[0].session, states.of[watched.endpoint]
                if sessions[-1:] == [session]:
                    continue
                sessions.append(session)
                if len(sessions) == 1:
                    assert counts_of(column).cached == 2
                    executor.kill()
                elif session == 0:
                    assert counts_of(column)[1:] == (0, 0, 0, 0)
                    services.append(start_executor(tmp_path, "--simulate", endpoint=executor.address))
                else:
                    assert counts_of(column)[1:] == (len(column) - 1, 0, 0, 0)
                    assert message.executors[0].lent_blocks > NUM_BLOCKS
                    break
    assert len(set(sessions)) == 3


class TestFewWatchers:
    @pytest.fixture
    def flags(self) -> dict[str, object]:
        return {"max_watchers": 2}

    async def test_watchers_are_bounded_and_who_leaves_makes_room_and_leaves_nothing(self, watched: Watched) -> None:
        first, second = messages(watched.client), messages(watched.client)
        await anext(first)
        await anext(second)
        with pytest.raises(ResourceExhaustedError, match="max_watchers"):
            await anext(messages(watched.client))
        await first.aclose()
        async with asyncio.timeout(10):
            while True:
                try:
                    await anext(third := messages(watched.client))
                    break
                except ResourceExhaustedError:
                    await asyncio.sleep(0.01)
        await third.aclose()
        await second.aclose()
        async with asyncio.timeout(10):
            while watched.engine.watch.is_watched:
                await asyncio.sleep(0.01)


class TestTokens:
    @pytest.fixture
    def tokens(self, tmp_path: Path) -> dict[str, str]:
        """By whose they are."""
        file = str(tmp_path / "tokens.toml")
        roles = {"all": ("--role", "read", "--role", "generate"), "none": ("--role", "generate")}
        made = {name: run_keys("token", file, name, *given).strip() for name, given in roles.items()}
        made["shop"] = run_keys("token", file, "shop", "--role", "read", "--tenant", "shop").strip()
        return made

    @pytest.fixture
    def flags(self, tokens: dict[str, str], tmp_path: Path) -> dict[str, object]:
        return {"token_file": tmp_path / "tokens.toml"}

    async def test_a_tenants_token_is_told_of_its_own_requests_alone(
        self, watched: Watched, tokens: dict[str, str]
    ) -> None:
        with pytest.raises(UnauthenticatedError):
            await anext(messages(watched.client))
        async with (
            Client(watched.address, token=tokens["all"]) as everybody,
            Client(watched.address, token=tokens["shop"]) as shop,
            Client(watched.address, token=tokens["none"]) as nobody,
            answering(everybody, "mine", PROMPT, max_tokens=400, tenant="shop"),
            answering(everybody, "other", [9] * 40, max_tokens=400, tenant="rival"),
        ):
            message = await anext(messages(everybody))
            assert [request.request_id for request in message.requests] == ["mine", "other"]
            message = await anext(messages(shop))
            assert [request.request_id for request in message.requests] == ["mine"]
            assert message.num_requests == 1
            assert message.executors[0].used_blocks >= 6  # of all: it says nothing of whose they are
            assert (await shop.block_tables("mine")).tables
            for call in (shop.block_tables("other"), shop.block_tables("neither")):
                with pytest.raises(NotFoundError, match="no live request is called"):
                    await call
            for call in (nobody.block_tables("mine"), nobody.prefix_tree(), anext(messages(nobody))):
                with pytest.raises(PermissionDeniedError):
                    await call
