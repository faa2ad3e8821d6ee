"""Cases of resuming and scheduling that have no better place."""

import pytest

from scheduler_svc.core.sequence import Sequence, State
from tests.core.run import Run, assert_exact
from tests.core.test_sharing import samples_of


def test_c1_5_samples_without_blocks_for_all_of_them_take_none_by_halves() -> None:
    """A holds six blocks of ten; six samples of a prompt that ends inside its second block would need seven more."""
    run = Run(num_blocks=10)
    other = run.submit(Sequence("a", list(range(100, 121)), 8))
    run.step()
    assert run.scheduler.state.cache.pool.num_used == 6
    samples = samples_of(list(range(7)), 6, max_tokens=8)
    run.submit(samples[0])
    run.to_the_end()  # the books are checked after each step
    assert_exact(samples, list(range(7)), 8)
    assert_exact([other], list(range(100, 121)), 8)


def test_c6_1_a_request_that_is_preempted_twice_and_resumed_in_chunks_forgets_and_repeats_nothing() -> None:
    run = Run(num_blocks=60, tokens_per_step=8, prefix_caching=False)
    sequence = run.submit(Sequence("r", list(range(30)), 40))
    seen: list[int] = []
    for wanted in (20, 25):
        while sequence.num_output < wanted:
            run.step()
            assert sequence.token_ids[30 : 30 + len(seen)] == seen
            seen = sequence.token_ids[30:]
        run.scheduler.state.preempt(sequence)
        before = len(run.plans)
        while sequence.num_output == wanted:
            run.step()
        assert len(run.plans) - before > 3, "it was meant to be resumed in chunks"
    run.to_the_end()
    assert_exact([sequence], list(range(30)), 40)
    assert run.scheduler.state.counters.generated_tokens == 40
    assert run.scheduler.state.counters.prompt_tokens == 30


def test_c6_6_only_rows_that_have_caught_up_get_a_token() -> None:
    """Budget 8: a long prompt beside three that decode and so leave it fewer and fewer, and samples of a prompt."""
    run = Run(num_blocks=100, num_rows=8, tokens_per_step=8)
    short = [run.submit(Sequence(f"s{i}", [i] * 2, 20)) for i in range(3)]
    long = run.submit(Sequence("long", list(range(64)), 4))
    samples = samples_of(list(range(100, 110)), 2)
    run.submit(samples[0])
    every = [*short, long, *samples]
    while True:
        before = [len(sequence.token_ids) for sequence in every]
        plan = run.step()
        if plan is None:
            break
        assert sum(len(sequence.token_ids) for sequence in every) - sum(before) == int(plan.samples.sum())
        columns = run.scheduler.state.columns
        for sequence, count in zip(every, before, strict=True):
            if sequence.state is State.RUNNING and columns.num_computed[sequence.row] < count:
                assert len(sequence.token_ids) == count
    for i, sequence in enumerate(short):
        assert_exact([sequence], [i] * 2, 20)
    assert_exact([long], list(range(64)), 4)
    assert_exact(samples, list(range(100, 110)))


def test_c6_6_an_empty_plan_gives_no_token() -> None:
    run = Run()
    plan = run.scheduler.plan(even_if_empty=True)
    assert plan is not None
    assert len(run.executor.run(plan).tokens) == 0


def assert_seldom_looked_up(run: Run, late: Sequence, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits for thirty plans; then it is answered."""
    looked_up, find = 0, run.scheduler.state.cache.find

    def counted(hashes: list[bytes]) -> list[int]:
        nonlocal looked_up
        looked_up += 1
        return find(hashes)

    monkeypatch.setattr(run.scheduler.state.cache, "find", counted)
    for _ in range(30):
        run.step()
        assert late.state is State.WAITING
    assert looked_up <= 7
    run.to_the_end()
    assert late.num_output == 4


def test_a_long_cached_prefix_that_finds_no_room_is_not_looked_up_in_every_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(num_blocks=60)
    run.answer(list(range(100)), 1)
    for i in range(2):
        run.submit(Sequence("r", [500 + i] * 50, 40))
    run.step()
    late = run.submit(Sequence("late", [*range(100), *range(200, 240)], 4))
    assert_seldom_looked_up(run, late, monkeypatch)


def test_nor_where_those_of_lower_priority_could_not_make_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(num_blocks=60)
    run.answer(list(range(100)), 1)
    run.submit(Sequence("equal", [500] * 50, 40, priority=1))
    run.submit(Sequence("low", [501] * 8, 40))
    run.step()
    late = run.submit(Sequence("late", [*range(100), *range(200, 300)], 4, priority=1))
    assert_seldom_looked_up(run, late, monkeypatch)
