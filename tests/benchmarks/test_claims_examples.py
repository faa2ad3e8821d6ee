"""The worked examples of paged attention, to the number, on the real core."""

import numpy as np
import pytest

from benchmarks.claims.memory import watched
from benchmarks.claims.paper import Paper, paper_lease
from benchmarks.claims.requests import Backlog, Mix, Source
from benchmarks.claims.slabs import BEST_SLABS, POLICIES, PolicyMaker, maximum, oracle, power_of_two, slab_scheduler
from benchmarks.claims.watched import Occupancy, WatchedScheduler
from scheduler_svc.core.audit import audit
from scheduler_svc.core.plan import Plan
from scheduler_svc.core.sequence import Sequence

BLOCK_SIZE, VOCAB_SIZE = 16, 100
SLAB = 4096


def _planned(scheduler: WatchedScheduler, num_blocks: int, *sequences: Sequence) -> Plan:
    """The plan that starts these, computing all of their prompts."""
    scheduler.attach(paper_lease(num_blocks, 64, 1 << 15, BLOCK_SIZE, VOCAB_SIZE))
    for sequence in sequences:
        scheduler.submit(sequence)
    plan = scheduler.plan()
    assert plan is not None
    assert len(plan.started) == len(sequences)
    return plan


def _prompt(num_tokens: int, max_tokens: int = 8) -> Sequence:
    return Sequence("r", [1] * num_tokens, max_tokens)


def _held(scheduler: WatchedScheduler) -> Occupancy:
    occupancy = Occupancy()
    occupancy.add(scheduler.state)
    return occupancy


def test_a_sequence_of_600_tokens_takes_38_blocks_of_16() -> None:
    scheduler = POLICIES["paged"](SLAB)
    (started,) = _planned(scheduler, 100, _prompt(600)).started
    assert len(started.blocks) == -(-600 // 16) == 38
    assert scheduler.state.cache.pool.num_used == 38
    assert _held(scheduler).slots["to_come"] + _held(scheduler).slots["never"] == 38 * 16 - 600 == 8


def test_a_request_of_200_tokens_in_a_slab_of_4096_wastes_95_percent() -> None:
    scheduler = POLICIES["slab_max"](SLAB)
    (started,) = _planned(scheduler, SLAB // 16, _prompt(200)).started
    assert started.blocks == list(range(1, 257))
    assert 1 - _held(scheduler).utilisation == pytest.approx(0.951, abs=5e-4)


def test_sequences_of_600_tokens_on_average_leave_85_percent_of_slabs_of_4096_idle() -> None:
    lengths = [100, 350, 600, 850, 1100]
    assert sum(lengths) / len(lengths) == 600
    scheduler = POLICIES["slab_max"](SLAB)
    _planned(scheduler, len(lengths) * SLAB // 16, *map(_prompt, lengths))
    assert 1 - _held(scheduler).utilisation == 1 - 600 / 4096 == pytest.approx(0.8535, abs=5e-5)


@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_at_no_step_has_a_sequence_more_than_a_block_less_one_slot_unused(block_size: int) -> None:
    lengths = tuple((1 + 37 * i % 90, 1 + 53 * i % 110) for i in range(97))
    scheduler = POLICIES["paged"](256)
    arrivals = Backlog(Source(Mix("any", lengths), VOCAB_SIZE), 4)
    unused: set[int] = set()

    def look(plan: Plan) -> None:
        audit(scheduler.state)
        columns = scheduler.state.columns
        rows = columns.running_rows()
        filled = np.maximum(columns.num_computed[rows], columns.num_tokens[rows])  # a prompt has its blocks at once
        unused.update((columns.num_blocks[rows] * block_size - filled).tolist())

    scheduler.watch = look
    Paper(scheduler, paper_lease(2048 // block_size, 64, 128, block_size, VOCAB_SIZE), arrivals).steps(400)
    assert max(unused) == block_size - 1


@pytest.mark.parametrize(
    ("size", "num_slots"),
    [(maximum, 2048), (power_of_two, 300 + 512), (oracle, 300 + 338)],
    ids=["maximum", "power of two", "oracle"],
)
def test_a_slab_is_as_large_as_its_policy_says(size, num_slots: int) -> None:
    scheduler = slab_scheduler(size, 2048)
    (started,) = _planned(scheduler, 128, _prompt(300, 338)).started
    assert len(started.blocks) == -(-num_slots // 16)
    assert started.blocks == list(range(started.blocks[0], started.blocks[0] + len(started.blocks)))


def test_a_power_of_two_never_passes_the_longest_sequence() -> None:
    (started,) = _planned(slab_scheduler(power_of_two, 2048), 128, _prompt(1500, 520)).started
    assert len(started.blocks) == 2048 // 16


def test_a_buddy_rounds_the_slab_of_650_tokens_up_to_1024_and_first_fit_does_not() -> None:
    used = {}
    for name, make in {"buddy": POLICIES["slab_oracle"], "first fit": BEST_SLABS}.items():
        scheduler = make(2048)
        _planned(scheduler, 128, _prompt(300, 350))
        used[name] = scheduler.state.cache.pool.num_used * 16
    assert used == {"buddy": 1024, "first fit": 656}


def test_a_slab_for_which_no_hole_is_long_enough_waits_though_the_blocks_are_there() -> None:
    scheduler = BEST_SLABS(2048)
    first, second, third = _prompt(64, 1), _prompt(64, 400), _prompt(64, 1)
    plan = _planned(scheduler, 39, first, second, third)
    assert [len(started.blocks) for started in plan.started] == [5, 29, 5]
    scheduler.cancel(first)
    scheduler.cancel(third)
    scheduler.submit(waiting := _prompt(80, 1))
    assert scheduler.plan() is not None
    assert scheduler.state.cache.pool.num_free == 10 > 6 == -(-81 // 16)
    assert waiting.row == -1


def test_what_rounding_had_taken_lets_the_next_slab_in_as_soon_as_it_is_given_back() -> None:
    scheduler = POLICIES["slab_oracle"](2048)
    held, waiting = _prompt(500, 28), _prompt(940, 20)  # 33 blocks, which a buddy makes 64; and 60
    _planned(scheduler, 72, held, _prompt(10, 6))  # another one goes on
    scheduler.submit(waiting)
    scheduler.plan()
    assert waiting.row == -1
    scheduler.cancel(held)
    scheduler.plan()
    assert waiting.row >= 0


@pytest.mark.parametrize("make", [*POLICIES.values(), BEST_SLABS], ids=[*POLICIES, "first fit"])
def test_every_policy_gives_back_what_it_took(make: PolicyMaker) -> None:
    scheduler = make(512)
    source = Source(Mix("any", tuple((1 + 31 * i % 200, 1 + 17 * i % 300) for i in range(50))), VOCAB_SIZE)
    paper = Paper(scheduler, paper_lease(128, 64, 256, BLOCK_SIZE, VOCAB_SIZE), Backlog(source, 0))
    occupancy = watched(scheduler)
    for _ in range(60):
        scheduler.submit(source.next(0.0))
    while paper.step():
        pass
    assert paper.meter.ended == 60
    assert sum(occupancy.slots.values()) == occupancy.num_plans * 128 * BLOCK_SIZE
    assert min(occupancy.slots.values()) >= 0
    assert scheduler.state.cache.pool.num_free == 128
