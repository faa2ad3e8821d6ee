"""Beam searches in the core: exact whatever shares, preempts, cancels or loses them."""

from dataclasses import replace

import pytest

from scheduler_svc.core.audit import audit
from scheduler_svc.core.beam import outputs_of
from scheduler_svc.core.beam_group import MAX_IDS
from scheduler_svc.core.beams import MissingCandidates
from scheduler_svc.core.plan import Lease
from scheduler_svc.core.scheduler import NeverFits, Scheduler
from scheduler_svc.core.sequence import EndReason, Sequence, State
from tests.core.beam_oracle import beam_answers
from tests.core.beams import beams_of
from tests.core.plain_executor import PlainExecutor
from tests.core.test_sharing import BLOCK_SIZE, Run, assert_exact, samples_of


def assert_found(answers: list[Sequence], prompt: list[int], width: int, max_tokens: int = 6, **options) -> None:
    expected = beam_answers(prompt, width, max_tokens, **options)[: len(answers)]
    assert [(answer.token_ids[len(prompt) :], answer.score) for answer in answers] == expected
    assert all(answer.state is State.ENDED for answer in answers)


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_answers_and_scores_are_those_of_a_search_over_whole_vocabularies(
    width: int, length_penalty: float, early_stopping: bool | str, max_tokens: int
) -> None:
    options = {"length_penalty": length_penalty, "early_stopping": early_stopping, "end_ids": (3, 10, 17, 24, 31, 38)}
    for prompt in ([1, 2, 3], [4] * 8, [9] * 13):
        for returned, min_tokens in ((1, 0), (width, 4)):
            run = Run(num_blocks=120)
            answers = beams_of(prompt, width, max_tokens, returned=returned, min_tokens=min_tokens, **options)
            run.scheduler.submit(answers[0])
            run.to_the_end()
            assert_found(answers, prompt, width, max_tokens, min_tokens=min_tokens, **options)
            assert run.executor.rows == {}


def test_answers_have_the_log_probability_of_each_token_and_the_reason_of_their_end() -> None:
    run, prompt = Run(), list(range(9))
    answers = beams_of(prompt, 3, 8, end_ids=(3, 10, 17, 24), length_penalty=0.0)
    run.scheduler.submit(answers[0])
    run.to_the_end()
    for answer in answers:
        assert len(answer.logprobs) == answer.num_output
        assert sum(entry.logprob for entry in answer.logprobs) == answer.score
        assert all(len(entry.top_ids) == 1 and entry.rank >= 1 for entry in answer.logprobs)
        ended = answer.token_ids[-1] in (3, 10, 17, 24)
        assert answer.end_reason is (EndReason.END_TOKEN if ended else EndReason.LENGTH)


@pytest.mark.parametrize("tokens_per_step", [64, 9, 8])
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 8, 30])
def test_beams_run_beside_samples_and_one_another(num_prompt: int, tokens_per_step: int) -> None:
    run = Run(num_blocks=120, num_rows=12, tokens_per_step=tokens_per_step)
    prompt, other = list(range(num_prompt)), list(range(100, 107))
    first, samples, second = beams_of(prompt, 3), samples_of(other, 3), beams_of(other, 4, 9)
    for sequences in (first, samples, second):
        run.scheduler.submit(sequences[0])
    run.to_the_end()
    assert_found(first, prompt, 3)
    assert_exact(samples, other)
    assert_found(second, other, 4, 9)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("num_blocks", [13, 14, 16, 17])
@pytest.mark.parametrize("tokens_per_step", [64, 9])
def test_groups_are_preempted_and_resumed_whole(num_blocks: int, tokens_per_step: int, prefix_caching: bool) -> None:
    run = Run(num_blocks=num_blocks, num_rows=12, tokens_per_step=tokens_per_step, prefix_caching=prefix_caching)
    prompt, others = list(range(6)), [list(range(100, 110)), list(range(200, 203))]
    answers = beams_of(prompt, 3, 14)
    plain = [Sequence("o", list(other), 20) for other in others]
    run.scheduler.submit(plain[0])
    run.scheduler.submit(answers[0])
    run.scheduler.submit(plain[1])
    run.to_the_end()
    assert run.scheduler.state.counters.preemptions > 0
    again = [[start.row for start in plan.started if start.num_prompt == len(prompt)] for plan in run.plans]
    assert [len(rows) for rows in again if rows] == [1, *(3 for _ in range(len([rows for rows in again if rows]) - 1))]
    assert_found(answers, prompt, 3, 14)
    for sequence, other in zip(plain, others, strict=True):
        assert_exact([sequence], other, 20)


def test_a_beam_group_that_fits_alone_is_let_in_and_what_can_never_fit_is_refused() -> None:
    # A prompt of 9: two whole blocks are shared; (9 + 10 - 1) tokens take 5 blocks, of which each beam has 3.
    for num_blocks, fits in ((2 + 3 * 4, True), (2 + 3 * 4 - 1, False)):
        run, answers = Run(num_blocks=num_blocks), beams_of(list(range(9)), 4, 10)
        if not fits:
            with pytest.raises(NeverFits):
                run.scheduler.submit(answers[0])
            continue
        run.scheduler.submit(answers[0])
        run.to_the_end()
        assert_found(answers, list(range(9)), 4, 10)
        assert run.scheduler.state.counters.preemptions == 0
    with pytest.raises(NeverFits):
        Run(num_rows=3).scheduler.submit(beams_of([1], 4)[0])


def least_blocks(prompt: list[int], width: int, max_tokens: int) -> int:
    """The smallest lease under which the search is not refused."""
    for num_blocks in range(1, 200):
        try:
            Run(num_blocks=num_blocks).scheduler.submit(beams_of(prompt, width, max_tokens)[0])
        except NeverFits:
            continue
        return num_blocks
    raise AssertionError("no lease is large enough")


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 6])
def test_what_is_not_refused_comes_to_its_end_even_if_it_must_start_anew(num_prompt: int, width: int) -> None:
    prompt = list(range(num_prompt))
    for max_tokens in range(1, 7):
        num_blocks = least_blocks(prompt, width, max_tokens)
        for when in range(7):
            run, answers = Run(num_blocks=num_blocks), beams_of(prompt, width, max_tokens)
            run.scheduler.submit(answers[0])
            for _ in range(when):
                run.step()
            if answers[0].state is State.RUNNING:
                run.scheduler.state.preempt(answers[0])
            run.to_the_end()
            assert_found(answers, prompt, width, max_tokens)


def test_beams_never_grow_so_long_that_no_plan_could_start_them_all_anew() -> None:
    scheduler = Scheduler()
    scheduler.attach(Lease(list(range(1, 200_000)), list(range(128)), 8192, 16, max_model_len=1 << 20))
    scheduler.submit(first := beams_of([1] * 9, 128, None)[0])
    assert first.max_total * 128 <= MAX_IDS
    with pytest.raises(NeverFits):
        scheduler.submit(beams_of([1] * (MAX_IDS // 128 - 5), 128, 6)[0])
    scheduler.submit(beams_of([1] * (MAX_IDS // 128 - 6), 128, 6)[0])


def test_without_max_tokens_beams_go_on_as_far_as_memory_does() -> None:
    run, answers = Run(num_blocks=14), beams_of(list(range(9)), 4, None)
    run.scheduler.submit(answers[0])
    run.to_the_end()
    assert_found(answers, list(range(9)), 4, 5 * BLOCK_SIZE + 1 - 9)


@pytest.mark.parametrize("when", range(9))
@pytest.mark.parametrize("ahead", [1, 2])
def test_beams_that_are_cancelled_leave_nothing_behind_whatever_the_moment(when: int, ahead: int) -> None:
    run, other = Run(num_blocks=80, tokens_per_step=9), Sequence("o", list(range(100, 110)), 12)
    answers = beams_of(list(range(14)), 4, 5)
    run.scheduler.submit(answers[0])
    run.scheduler.submit(other)
    for _ in range(when):
        run.step()
    late = run.scheduler.plan() if ahead == 2 else None
    run.scheduler.cancel(answers[0])
    audit(run.scheduler.state)
    if late is not None:
        run.scheduler.apply(run.executor.run(late))
    run.to_the_end()
    assert_exact([other], list(range(100, 110)), 12)
    assert (run.scheduler.state.num_waiting, run.scheduler.state.groups, run.executor.rows) == (0, {}, {})
    assert run.scheduler.state.columns.num_free_rows == 8


@pytest.mark.parametrize("when", range(8))
def test_beams_outlive_the_executor(when: int) -> None:
    prompt, run = list(range(14)), Run(num_blocks=80, tokens_per_step=9)
    answers = beams_of(prompt, 4)
    run.scheduler.submit(answers[0])
    for _ in range(when):
        run.step()
    lease = run.scheduler.state.lease
    assert run.scheduler.detach() == answers[:1] * (when > 0 and answers[0].state is not State.ENDED)
    run.scheduler.attach(lease)
    run.executor = PlainExecutor(lease)
    run.to_the_end()
    assert_found(answers, prompt, 4)


def test_beams_outlive_an_executor_whose_result_is_taken_in_by_half() -> None:
    """No tokens are waited for that nobody will send: all behind them in the queue would wait, too."""
    prompt, run = list(range(14)), Run(num_blocks=80)
    answers = beams_of(prompt, 4)
    run.scheduler.submit(answers[0])
    for _ in range(3):
        run.step()
    plan = run.scheduler.plan()
    assert plan is not None
    result = run.executor.run(plan)
    assert result.logprobs is not None
    with pytest.raises(MissingCandidates):
        run.scheduler.apply(replace(result, logprobs=[*result.logprobs[:2], None, None]))
    run.scheduler.detach()
    run.scheduler.attach(run.lease)
    run.executor = PlainExecutor(run.lease)
    run.to_the_end()
    assert_found(answers, prompt, 4)


def test_a_return_with_too_little_memory_ends_all_answers() -> None:
    run, answers = Run(), beams_of(list(range(14)), 3)
    run.scheduler.submit(answers[0])
    run.step()
    run.scheduler.detach()
    assert run.scheduler.attach(Lease([1, 2, 3, 4, 5], [0, 1, 2], 8, BLOCK_SIZE)) == answers
    assert all(answer.state is State.ENDED for answer in answers)


def test_a_beam_whose_logits_are_not_finite_ends_its_group() -> None:
    run, answers = Run(), beams_of(list(range(5)), 3)
    run.scheduler.submit(answers[0])
    for _ in range(2):
        run.step()
    plan = run.scheduler.plan()
    assert plan is not None
    result = run.executor.run(plan)
    result.tokens[1] = -1
    assert run.scheduler.apply(result).ended == answers
    assert {answer.end_reason for answer in answers} == {EndReason.NOT_FINITE}
    run.to_the_end()


@pytest.mark.parametrize("num_prompt", [7, 8, 17])
def test_only_partly_filled_blocks_are_copied_and_by_all_but_one_of_their_holders(num_prompt: int) -> None:
    run, answers = Run(num_blocks=120), beams_of(list(range(num_prompt)), 4, 12)
    run.scheduler.submit(answers[0])
    forked = 0
    while (plan := run.scheduler.plan()) is not None:
        parents = [fork.parent for fork in plan.forks if fork.parent != fork.row]
        inside = (answers[0].group.num_tokens - 1) % BLOCK_SIZE
        assert len(plan.copies.rows) == (len(parents) if inside else 0)
        forked += len(parents)
        run.scheduler.apply(run.executor.run(plan))
    assert forked > 3


@pytest.mark.parametrize("num_prompt", [5, 6, 7, 8])
def test_beams_start_anew_where_all_their_keys_change(num_prompt: int) -> None:
    prompt, run = list(range(num_prompt)), Run(num_blocks=80, rope_switch_len=10)
    answers = beams_of(prompt, 3, 9)
    run.scheduler.submit(answers[0])
    run.to_the_end()
    assert_found(answers, prompt, 3, 9)
    assert sum(len(plan.started) for plan in run.plans) == 4


def test_a_group_under_suspicion_is_computed_alone() -> None:
    run, prompt, other = Run(num_blocks=80), list(range(6)), Sequence("o", list(range(100, 110)), 12)
    answers = beams_of(prompt, 3)
    run.scheduler.submit(other)
    run.scheduler.submit(answers[0])
    for _ in range(3):
        run.step()
    lease = run.scheduler.state.lease
    for sequence in run.scheduler.detach():
        sequence.alone = sequence is answers[0]
    run.scheduler.attach(lease)
    run.executor = PlainExecutor(lease)
    while answers[0].state is not State.ENDED:
        plan = run.step()
        assert plan is not None
        held = {run.scheduler.state.columns.sequence[row] for row in plan.rows.tolist()} - {None}
        assert not (other in held and len(held) > 1)
    run.to_the_end()
    assert_found(answers, prompt, 3)
    assert_exact([other], list(range(100, 110)), 12)


def test_a_group_gets_a_token_when_all_beams_have_theirs() -> None:
    """What one beam has drawn is lost with the executor: a beam that takes it down each time must not be forgiven."""
    run, answers = Run(num_blocks=80, tokens_per_step=8), beams_of(list(range(6)), 3)
    run.scheduler.submit(answers[0])
    for _ in range(4):
        run.step()
    run.scheduler.state.preempt(answers[0])
    steps = []
    while answers[0].state is not State.ENDED and (plan := run.scheduler.plan()) is not None:
        before = answers[0].group.search.num_tokens
        updated = run.scheduler.apply(run.executor.run(plan)).updated
        advanced = answers[0].group.search.num_tokens > before
        assert updated == [answers[0]] * advanced
        steps.append((len(plan.samples) > 0 and bool(plan.samples.any()), advanced))
    assert (True, False) in steps, "some beam was meant to draw before the others"


def test_the_same_search_again_and_again_finds_the_same_and_leaves_no_record() -> None:
    run = Run(num_blocks=80)
    for i in range(40):
        prompt = [i % 3] * 6
        answers = beams_of(prompt, 4)
        run.scheduler.submit(answers[0])
        if i % 4 == 3:
            for _ in range(i % 5):
                run.step()
            run.scheduler.cancel(answers[0])
        run.to_the_end()
        if i % 4 != 3:
            assert_found(answers, prompt, 4)
    assert (run.scheduler.state.groups, run.scheduler.state.forks, run.scheduler.state.leaders) == ({}, [], [])


def test_a_search_remembers_of_candidates_no_more_than_it_will_tell() -> None:
    run, answers = Run(num_blocks=80), beams_of([1, 2, 3], 4, 9, end_ids=tuple(range(20)), min_tokens=9)
    run.scheduler.submit(answers[0])
    for _ in range(5):
        run.step()
    remembered = [node for beam in answers[0].group.search.beams for node in outputs_of(beam.last)]
    assert len(remembered) == 4 * 5
    assert all(len(node.logprobs.top_ids) == len(node.logprobs.top_logprobs) == 1 for node in remembered)
