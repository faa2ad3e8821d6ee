"""Policies differ in memory and in nothing else: on a real executor process every one gives the same tokens."""

from collections.abc import AsyncIterator

import pytest

from benchmarks.claims.paper import Paper, paper_lease
from benchmarks.claims.requests import Backlog, Mix, Source
from benchmarks.claims.served import Executor, Serving, ServingFailed
from benchmarks.claims.slabs import BEST_SLABS, POLICIES, PolicyMaker, oracle, slab_scheduler
from executor_svc.simulated.text import simulated_continuation
from scheduler_svc.core.sequence import Sequence

LONGEST, NUM_BLOCKS, NUM_REQUESTS = 256, 64, 40
FLAGS = ["--simulate", "--num-blocks", "101", "--tokens-per-step", "128", "--max-rows", "32"]
FLAGS += ["--shutdown-grace-s", "0.1"]  # nobody says goodbye
MIX = Mix("any", tuple((1 + 31 * i % 90, 1 + 17 * i % 120) for i in range(NUM_REQUESTS)))


@pytest.fixture
async def executor() -> AsyncIterator[Executor]:
    async with Executor.started(FLAGS) as started:
        yield started


async def _answers(executor: Executor, make: PolicyMaker) -> list[list[int]]:
    scheduler = make(LONGEST)
    scheduler.num_blocks = NUM_BLOCKS
    source = Source(MIX, executor.lease.vocab_size)
    async with Serving(executor, scheduler) as serving:
        serving.begin()
        asked = [source.next(serving.now) for _ in range(NUM_REQUESTS)]
        for sequence in asked:
            serving.submit(sequence)
        await serving.until(lambda: serving.meter.ended == NUM_REQUESTS)
        assert serving.meter.tokens == sum(num_output for _, num_output in MIX.lengths)
        assert len(serving.meter.first_tokens_s) == NUM_REQUESTS
        assert scheduler.state.cache.pool.num_free == NUM_BLOCKS
    vocab_size = executor.lease.vocab_size
    for sequence in asked:
        prompt, output = sequence.token_ids[: sequence.num_prompt], sequence.token_ids[sequence.num_prompt :]
        assert output == simulated_continuation(prompt, len(output), vocab_size=vocab_size)
    return [sequence.token_ids for sequence in asked]


async def test_every_policy_gives_the_same_tokens(executor: Executor) -> None:
    answers = {name: await _answers(executor, make) for name, make in {**POLICIES, "first fit": BEST_SLABS}.items()}
    for name, given in answers.items():
        assert given == answers["paged"], name


async def test_what_ran_on_paper_goes_on_with_the_executor(executor: Executor) -> None:
    scheduler = POLICIES["paged"](LONGEST)
    backlog = Backlog(Source(MIX, executor.lease.vocab_size), 3)
    paper = Paper(scheduler, paper_lease(NUM_BLOCKS, 32, 128, 16, executor.lease.vocab_size), backlog)
    paper.steps(100)
    running = [scheduler.state.sequence_in(row) for row in scheduler.state.columns.running_rows()]
    known = {sequence: len(sequence.token_ids) for sequence in running}
    paper.end()
    scheduler.num_blocks = NUM_BLOCKS
    async with Serving(executor, scheduler, backlog) as serving:
        await serving.until(lambda: serving.meter.ended > 2 * len(running))
    assert running
    assert all(len(sequence.token_ids) > num_tokens for sequence, num_tokens in known.items())


async def test_a_session_that_cannot_serve_says_so(executor: Executor) -> None:
    scheduler = slab_scheduler(oracle, LONGEST)
    scheduler.num_blocks = 2
    scheduler.submit(Sequence("r", [1] * 30, 100))
    with pytest.raises(ServingFailed, match="1 sequences can never fit 2 blocks"):
        async with Serving(executor, scheduler) as serving:
            await serving.until(lambda: False)
