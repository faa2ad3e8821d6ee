"""Samples of one prompt: computed once, stored once, and copied only where they part."""

from dataclasses import replace

import pytest

from scheduler_svc.core.audit import audit
from scheduler_svc.core.plan import MAX_SENT, Lease
from scheduler_svc.core.sequence import Sampling, Sequence, State
from scheduler_svc.core.token_rules import TokenRules
from tests.core.plain_executor import PlainExecutor
from tests.core.run import BLOCK_SIZE, Run, assert_exact


def samples_of(prompt: list[int], count: int, max_tokens: int = 6) -> list[Sequence]:
    shared = list(prompt)  # as the engine does it
    samples = [Sequence("r", shared, max_tokens, Sampling(index=index)) for index in range(count)]
    samples[0].held = samples[1:]
    return samples


@pytest.mark.parametrize("tokens_per_step", [64, 9])
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 8, 30])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_prompt_is_computed_once_and_its_last_block_copied_for_all_samples_but_one(
    num_prompt: int, count: int, tokens_per_step: int
) -> None:
    prompt, run = list(range(num_prompt)), Run(tokens_per_step=tokens_per_step)
    samples = samples_of(prompt, count)
    run.scheduler.submit(samples[0])
    run.to_the_end()
    assert_exact(samples, prompt)
    assert run.num_computed == num_prompt + 5 * count  # the last token of each needs no K/V
    assert run.num_copies == (count - 1 if num_prompt % BLOCK_SIZE else 0)


@pytest.mark.parametrize("num_prompt", [7, 8])
def test_samples_of_one_token_need_no_copy(num_prompt: int) -> None:
    prompt, run = list(range(num_prompt)), Run()
    samples = samples_of(prompt, 4, max_tokens=1)
    run.scheduler.submit(samples[0])
    run.to_the_end()
    assert_exact(samples, prompt, 1)
    assert (run.num_computed, run.num_copies) == (num_prompt, 0)
    counters = run.scheduler.state.counters
    assert (counters.peak_used_blocks, counters.peak_unused_slots) == (2, 8 - num_prompt)


def test_all_samples_draw_from_the_step_that_ends_the_prompt() -> None:
    run, samples = Run(tokens_per_step=9), samples_of(list(range(20)), 3)
    run.scheduler.submit(samples[0])
    assert [sum(run.step().samples) for _ in range(3)] == [0, 0, 3]
    assert run.plans[2].num_tokens.tolist() == [2, 0, 0]


def test_samples_without_a_row_wait_and_find_the_prompt_in_the_cache() -> None:
    prompt, run = list(range(20)), Run(num_rows=2)
    samples = samples_of(prompt, 5)
    run.scheduler.submit(samples[0])
    run.to_the_end()
    assert_exact(samples, prompt)
    assert run.num_computed <= 20 + 3 * BLOCK_SIZE + 5 * 5
    # Their request is counted once, and what it finds of itself is nothing that others had left.
    assert [sample.num_cached for sample in samples] == [0] * 5
    counters = run.scheduler.state.counters
    assert (counters.prompt_tokens, counters.cached_prompt_tokens) == (20, 0)


def test_samples_whose_rules_fill_a_plan_come_in_several() -> None:
    rules = TokenRules(banned=tuple((i, *range(15)) for i in range(500)))
    prompt, run = list(range(20)), Run(num_rows=100, num_blocks=400, tokens_per_step=200)
    others = [Sequence(f"o{i}", [i], 9, Sampling(rules=rules)) for i in range(40)]
    samples = samples_of(prompt, 40)
    for sample in samples:
        sample.sampling = replace(sample.sampling, rules=rules)
    for sequence in (*others, samples[0]):
        run.scheduler.submit(sequence)
    run.to_the_end()
    assert_exact(samples, prompt)
    for plan in run.plans:
        for rows in (plan.started, plan.joined):
            assert sum(row.sampling.rules.num_sent for row in rows) <= MAX_SENT
    assert max(len(plan.joined) for plan in run.plans) > 20


def test_samples_without_blocks_wait() -> None:
    # Six blocks of ten are another's; the prompt takes two, and each of five samples would take one more.
    run = Run(num_blocks=10)
    other = Sequence("other", list(range(100, 124)), 12)
    run.scheduler.submit(other)
    run.step()
    samples = samples_of(list(range(7)), 6, max_tokens=8)
    run.scheduler.submit(samples[0])
    run.to_the_end()
    assert_exact(samples, list(range(7)), 8)
    assert_exact([other], list(range(100, 124)), 12)


@pytest.mark.parametrize("when", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("first", [0, 2])
def test_samples_that_are_cancelled_leave_nothing_behind_whatever_the_moment(when: int, first: int) -> None:
    run, samples = Run(tokens_per_step=9), samples_of(list(range(14)), 4)
    run.scheduler.submit(samples[0])
    for _ in range(when):
        run.step()
    for sample in samples[first:] + samples[:first]:
        run.scheduler.cancel(sample)
        audit(run.scheduler.state)
    run.to_the_end()
    assert run.scheduler.state.num_waiting == 0
    assert run.executor.rows == {}


@pytest.mark.parametrize("when", [0, 1, 2, 3, 4])
def test_the_others_go_on_when_the_first_sample_is_cancelled(when: int) -> None:
    prompt, run = list(range(14)), Run(tokens_per_step=9)
    samples = samples_of(prompt, 4)
    run.scheduler.submit(samples[0])
    for _ in range(when):
        run.step()
    run.scheduler.cancel(samples[0])
    run.to_the_end()
    assert_exact(samples[1:], prompt)


@pytest.mark.parametrize("when", [0, 1, 2, 3])
def test_samples_outlive_the_executor(when: int) -> None:
    prompt, run = list(range(14)), Run(tokens_per_step=9)
    samples = samples_of(prompt, 4)
    run.scheduler.submit(samples[0])
    for _ in range(when):
        run.step()
    lease = run.scheduler.state.lease
    run.scheduler.detach()
    run.scheduler.attach(lease)
    run.executor = PlainExecutor(lease)
    run.to_the_end()
    assert_exact(samples, prompt)


def test_a_return_with_too_little_memory_ends_all_samples() -> None:
    run, samples = Run(), samples_of(list(range(14)), 3)
    run.scheduler.submit(samples[0])
    run.scheduler.detach()
    assert set(map(id, run.scheduler.attach(Lease([1, 2], [0], 8, BLOCK_SIZE)))) == set(map(id, samples))
    assert all(sample.state is State.ENDED for sample in samples)
    assert run.scheduler.state.num_waiting == 0


def test_a_sample_that_joins_in_the_row_of_a_victim_of_the_same_plan_gets_none_of_its_blocks() -> None:
    # All but one of the first request's samples copy their last block in the second plan. Two of them must give way
    # there, one with such a copy, and its row is taken at once by the second request's other sample.
    run = Run(num_blocks=10, num_rows=5, tokens_per_step=16)
    early, late = samples_of(list(range(15)), 4), samples_of(list(range(100, 108)), 2, max_tokens=1)
    run.scheduler.submit(early[0])
    run.scheduler.submit(late[0])
    assert run.step().joined
    for sample in early:  # from now on the last in the order
        sample.rank = sample.rank._replace(place=1e9)
        run.scheduler.state.columns.rank_place[sample.row] = 1e9
    victim = early[-2].row
    assert [entry.row for entry in run.step().joined] == [victim]
    assert victim in run.plans[-1].ended
    assert victim not in run.plans[-1].copies.rows
    run.to_the_end()
    assert_exact(early, list(range(15)))
    assert_exact(late, list(range(100, 108)), 1)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_requests_that_wait_do_not_take_the_rows_of_samples_before_them(prefix_caching: bool) -> None:
    run = Run(num_blocks=400, tokens_per_step=256)
    run.scheduler.state.prefix_caching = prefix_caching
    requests = [samples_of(list(range(100 * i, 100 * i + 23)), 4) for i in range(8)]
    for samples in requests:
        run.scheduler.submit(samples[0])
    run.to_the_end()
    assert run.num_computed == 8 * (23 + 5 * 4)
    assert run.num_copies == 8 * 3


def test_held_samples_wait_too_and_share_the_ids_of_their_prompt() -> None:
    run, samples = Run(num_rows=2), samples_of(list(range(100)), 5)
    run.scheduler.submit(samples[0])
    assert run.scheduler.state.num_waiting == 5
    run.step()
    assert [run.scheduler.state.num_waiting, run.scheduler.state.num_held] == [4, 4]
    run.step()
    assert [run.scheduler.state.num_waiting, run.scheduler.state.num_held] == [3, 0]
    assert len({id(sample.token_ids) for sample in samples[2:]}) == 1
    # None of them hashes it again.
    assert all(len(sample.block_hashes) == 100 // BLOCK_SIZE for sample in samples)


def test_a_held_sample_that_is_cancelled_never_joins() -> None:
    prompt, run = list(range(14)), Run(tokens_per_step=9)
    samples = samples_of(prompt, 4)
    run.scheduler.submit(samples[0])
    run.step()
    run.scheduler.cancel(samples[2])
    run.to_the_end()
    assert samples[2].token_ids == prompt
    assert_exact([samples[0], samples[1], samples[3]], prompt)
