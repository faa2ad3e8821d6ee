"""Where requests go among several executors, and how those that wait are moved."""

import pytest

from scheduler_svc.core.accounts import Accounts
from scheduler_svc.core.admission import AdmissionQueue
from scheduler_svc.core.audit import audit, audit_idle
from scheduler_svc.core.placement import MAX_WORTH, STEP_WORTH, Placement, load
from scheduler_svc.core.plan import Amounts, Lease, LeaseChange
from scheduler_svc.core.scheduler import NeverFits, Scheduler
from scheduler_svc.core.sequence import Sampling, Sequence, State
from tests.core.run import BLOCK_SIZE, Run, assert_exact

PREFIX = list(range(1000, 1000 + 10 * BLOCK_SIZE))


def runs(count: int = 2, **each: int) -> list[Run]:
    """Executors whose tenants have common accounts."""
    accounts = Accounts()
    return [Run(queue=AdmissionQueue(accounts), **each) for _ in range(count)]


def schedulers(*those: Run) -> list[Scheduler]:
    return [run.scheduler for run in those]


def asked(name: str, prompt: list[int], max_tokens: int | None = 6, **told: object) -> Sequence:
    return Sequence(name, prompt, max_tokens, **told)


def own(number: int, length: int = 8) -> list[int]:
    return list(range(number * 100, number * 100 + length))


class TestChoice:
    def test_equal_executors_take_turns(self) -> None:
        a, b = runs()
        placement = Placement()
        for i in range(8):
            sequence = asked(f"r{i}", own(i))
            chosen = placement.choose(sequence, schedulers(a, b))
            assert chosen is not None
            chosen.submit(sequence)
        assert len(a.scheduler.state.queue) == len(b.scheduler.state.queue) == 4

    def test_the_less_loaded_one_is_taken(self) -> None:
        a, b = runs()
        a.submit(asked("running", own(1), 40))
        a.step()
        assert Placement().choose(asked("new", own(2)), schedulers(a, b)) is b.scheduler
        for i in range(3):
            b.submit(asked("waiting", own(3 + i)))
        assert Placement().choose(asked("new", own(2)), schedulers(a, b)) is a.scheduler

    def test_load_is_a_share_of_what_is_lent(self) -> None:
        small, large = Run(num_rows=2), Run(num_rows=8)
        for run in (small, large):
            run.submit(asked("r", own(1)))
        large.submit(asked("s", own(2)))
        assert load(large.scheduler) < load(small.scheduler)

    def test_load_is_a_share_of_what_is_lent_now(self) -> None:
        """An executor that was shared when its session began lends as much as the other one by now."""
        grown, other = Scheduler(), Run().scheduler
        grown.attach(Lease([1, 2, 3, 4], [0, 1], 8, BLOCK_SIZE, most_lent=Amounts(60, 8, 64)))
        grown.change_lease(LeaseChange(list(range(5, 61)), list(range(2, 8)), granted_tokens=56))
        for scheduler in (grown, other):
            scheduler.submit(asked("r", own(1, 16)))
        assert load(grown) == load(other)

    def test_rows_that_are_lent_to_others_are_no_load(self) -> None:
        part, other = runs()
        part.scheduler.change_lease(LeaseChange(keep=Amounts(30, 4, 32)))
        part.step()
        assert load(part.scheduler) == load(other.scheduler) == 0

    def test_a_request_goes_where_its_prompt_is_cached(self) -> None:
        a, b, c = runs(3)
        b.answer([*PREFIX, 1], 2)
        for _ in range(3):
            assert Placement().choose(asked("r", [*PREFIX, 2]), schedulers(a, b, c)) is b.scheduler

    def test_a_hot_prefix_fills_one_executor_only_so_far(self) -> None:
        """Up to what it is worth; from there on both are filled alike."""
        a, b = runs(num_blocks=400, num_rows=64, tokens_per_step=80)
        a.answer([*PREFIX, 1], 2)
        placement, chosen = Placement(), []
        for i in range(40):
            sequence = asked(f"r{i}", [*PREFIX, *own(i, 2)])
            target = placement.choose(sequence, schedulers(a, b))
            assert target is not None
            chosen.append(target)
            target.submit(sequence)
            for run in (a, b):
                run.scheduler.plan()  # computed, and published
        worth = STEP_WORTH * len(PREFIX) / 80
        num_a, num_b = chosen.count(a.scheduler), chosen.count(b.scheduler)
        assert chosen[:2] == [a.scheduler] * 2
        assert 0 <= num_a - num_b <= worth * 64 + 1

    def test_nothing_that_is_cached_makes_up_for_more_than_a_bounded_difference_of_load(self) -> None:
        a, b = runs(num_blocks=400, num_rows=16, tokens_per_step=20)
        prompt = list(range(5000, 5000 + 600))
        a.answer([*prompt, 1], 2)
        assert STEP_WORTH * len(prompt) / 20 > 1
        for i in range(2, 6):
            a.submit(asked(f"r{i}", own(i), 40))
        assert Placement().choose(asked("r", prompt), schedulers(a, b)) is a.scheduler
        for i in range(6, 12):
            a.submit(asked(f"r{i}", own(i), 40))
        assert load(a.scheduler) - load(b.scheduler) > MAX_WORTH
        assert Placement().choose(asked("r", prompt), schedulers(a, b)) is b.scheduler

    def test_of_executors_of_several_sizes_only_those_are_taken_that_can_hold_it(self) -> None:
        small, large = runs(1, num_blocks=5) + runs(1, num_blocks=60)
        for i in range(6):
            large.submit(asked("waiting", own(10 + i), 40))
        assert Placement().choose(asked("long", own(2), 60), schedulers(small, large)) is large.scheduler
        assert Placement().choose(asked("short", own(2), 4), schedulers(small, large)) is small.scheduler
        assert Placement().choose(asked("huge", own(2), 1000), schedulers(small, large)) is None

    def test_an_answer_without_a_limit_goes_only_where_it_may_become_longest(self) -> None:
        small, large = runs(1, num_blocks=5) + runs(1, num_blocks=60)
        large.submit(asked("running", own(1), 40))
        sequence = asked("open", own(2), None)
        assert Placement().choose(sequence, schedulers(small, large)) is large.scheduler
        assert sequence.max_total == 0, "to ask changes nothing"

    def test_nobody_is_sent_to_where_a_suspect_is_computed_alone(self) -> None:
        a, b = runs()
        suspect = a.submit(asked("suspect", own(1), 40))
        suspect.alone = True
        for i in range(7):
            b.submit(asked(f"r{i}", own(2 + i)))
        assert Placement().choose(asked("new", own(20)), schedulers(a, b)) is b.scheduler
        a.step()
        assert Placement().choose(asked("new", own(20)), schedulers(a, b)) is b.scheduler


class TestRelief:
    def test_who_waits_moves_to_an_executor_that_is_idle_and_starts_there_at_once(self) -> None:
        a, b = runs(num_rows=2, tokens_per_step=16)
        sequences = [a.submit(asked(f"r{i}", own(i), 20)) for i in range(6)]
        a.step()
        moved = Placement().relief(schedulers(a, b))
        assert moved == (sequences[2], b.scheduler), "the first that waits"
        a.scheduler.move(*moved)
        b.step()
        assert sequences[2].state is State.RUNNING
        b.step()
        for run in (a, b):
            audit(run.scheduler.state)
            run.to_the_end()
        for i, sequence in enumerate(sequences):
            assert_exact([sequence], own(i), 20)

    def test_nobody_moves_to_an_executor_that_would_let_it_wait(self) -> None:
        a, b = runs(num_rows=2, tokens_per_step=16)
        for run, count in ((a, 6), (b, 2)):
            for i in range(count):
                run.submit(asked(f"r{i}", own(i), 20))
            run.step()
        assert Placement().relief(schedulers(a, b)) is None

    def test_nobody_moves_between_executors_of_equal_load(self) -> None:
        a, b = runs()
        a.submit(asked("r", own(1)))
        assert Placement().relief(schedulers(a, b)) is None, "it starts in the next plan anyway"

    def test_a_suspect_is_not_moved(self) -> None:
        a, b = runs(num_rows=2, tokens_per_step=16)
        for i in range(4):
            a.submit(asked(f"r{i}", own(i), 20))
        a.step()
        for sequence in a.scheduler.state.queue:
            sequence.alone = True
        assert Placement().relief(schedulers(a, b)) is None


class TestMoving:
    def test_it_keeps_its_place_in_the_one_order(self) -> None:
        a, b = runs()
        first, second, third = asked("1", own(1)), asked("2", own(2)), asked("3", own(3))
        a.submit(first)
        b.submit(second)
        b.submit(third)
        a.scheduler.move(first, b.scheduler)
        assert list(b.scheduler.state.queue) == [first, second, third]
        assert len(a.scheduler.state.queue) == 0
        assert first.scheduler is b.scheduler

    def test_what_was_lost_in_the_midst_goes_on_elsewhere_exactly(self) -> None:
        a, b = runs()
        sequences = [a.submit(asked(f"r{i}", own(i), 12)) for i in range(4)]
        for _ in range(5):
            a.step()
        assert {sequence.num_output for sequence in sequences} == {5}
        assert a.scheduler.detach() == sequences
        for sequence in list(a.scheduler.state.queue):
            a.scheduler.move(sequence, b.scheduler)
        b.to_the_end()
        for i, sequence in enumerate(sequences):
            assert_exact([sequence], own(i), 12)
        audit_idle(a.scheduler.state)
        assert a.scheduler.state.num_waiting == b.scheduler.state.num_waiting == 0

    def test_samples_that_are_held_go_with_the_one_that_holds_them(self) -> None:
        a, b = runs()
        prompt = own(1)
        samples = [asked("n", prompt, sampling=Sampling(index=i)) for i in range(3)]
        samples[0].held = samples[1:]
        a.submit(samples[0])
        assert (a.scheduler.state.num_waiting, a.scheduler.state.queue.num_rows) == (3, 3)
        a.scheduler.move(samples[0], b.scheduler)
        assert (a.scheduler.state.num_waiting, b.scheduler.state.num_waiting) == (0, 3)
        assert (a.scheduler.state.queue.num_rows, a.scheduler.state.queue.num_tokens) == (0, 0)
        samples[2].scheduler.cancel(samples[2])  # type: ignore[union-attr]
        b.to_the_end()
        assert_exact(samples[:2], prompt)
        assert b.scheduler.state.num_waiting == 0

    def test_hashes_of_another_block_size_are_forgotten(self) -> None:
        a, b = runs(1)[0], Run(block_size=8)
        sequence = a.submit(asked("r", own(1, 20)))
        a.scheduler.state.extend_hashes(sequence)
        a.scheduler.move(sequence, b.scheduler)
        assert not sequence.block_hashes
        b.to_the_end()
        assert_exact([sequence], own(1, 20))

    def test_what_could_never_fit_stays_where_it_is(self) -> None:
        a, b = runs(1, num_blocks=60) + runs(1, num_blocks=4)
        sequence = a.submit(asked("r", own(1), 100))
        with pytest.raises(NeverFits):
            a.scheduler.move(sequence, b.scheduler)
        assert sequence.scheduler is a.scheduler
        a.to_the_end()
        assert_exact([sequence], own(1), 100)

    def test_nobody_moves_whose_tokens_are_in_flight(self) -> None:
        a, b = runs()
        sequence = a.submit(asked("r", own(1)))
        a.scheduler.plan()
        with pytest.raises(RuntimeError, match="running"):
            a.scheduler.move(sequence, b.scheduler)
        a.scheduler.state.preempt(sequence)
        with pytest.raises(RuntimeError, match="1 tokens in flight"):
            a.scheduler.move(sequence, b.scheduler)
