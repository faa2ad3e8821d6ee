"""Where beams begin that start anew: in the blocks of the earlier beam that they are most like."""

import random

import pytest

from scheduler_svc.core.beam_start import BeamStart
from scheduler_svc.core.sequence import Sequence, State
from tests.core.beams import beams_of
from tests.core.run import Run


def most_like(earlier: list[list[int]], beam: list[int], block_size: int) -> tuple[int, int]:
    best = (0, 0)
    for index, other in enumerate(earlier):
        num_shared = max(i for i in range(len(beam)) if beam[: i * block_size] == other[: i * block_size])
        num_shared = min(num_shared, (len(beam) - 2) // block_size)
        if num_shared > best[1]:
            best = (index, num_shared)
    return best


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 8])
def test_each_beam_shares_all_whole_blocks_with_the_one_most_like_it(num_prompt: int, block_size: int) -> None:
    chance, prompt = random.Random(num_prompt), list(range(100, 100 + num_prompt))
    for num_output in (1, 2, 3, 7, 12):
        outputs = [[chance.choice([1, 1, 1, 2]) for _ in range(num_output)] for _ in range(6)]
        beams = [prompt + output for output in outputs]
        start = BeamStart.of([Sequence("b", beam) for beam in beams], num_prompt, block_size)
        assert start.likes == [most_like(beams[:i], beam, block_size) for i, beam in enumerate(beams) if i]
        num_blocks = -(-len(beams[0]) // block_size)
        assert start.most_blocks == num_blocks * 6 - sum(shared for _, shared in start.likes)


def test_a_group_without_room_is_looked_at_once_however_long_it_waits() -> None:
    run, other = Run(num_blocks=14), Sequence("o", list(range(30)), 20, priority=1)
    answers = beams_of(list(range(9)), 4, 9)
    run.scheduler.submit(answers[0])
    for _ in range(5):
        run.step()
    run.scheduler.submit(other)
    for _ in range(2):
        run.step()
    assert (other.state, answers[0].state) == (State.RUNNING, State.WAITING)
    start = answers[0].group.waiting
    assert start is not None
    for _ in range(3):
        run.step()
        assert answers[0].group.waiting is start
    run.to_the_end()
    assert answers[0].group.waiting is None
