"""Allocators of consecutive blocks: runs never overlap, what is given back is whole again, and holes are of no use."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.claims.runs import Buddy, FirstFit, Runs

MAKERS = [Buddy, FirstFit]


@pytest.mark.parametrize("make", MAKERS)
@given(num_blocks=st.integers(1, 70), wishes=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), max_size=40))
def test_runs_lie_apart_and_what_is_given_back_is_whole_again(
    make: Callable[[int], Runs], num_blocks: int, wishes: list[tuple[int, int]]
) -> None:
    runs, held = make(num_blocks), {}
    for count, leaving in wishes:
        if runs.has_room(count):
            before = runs.num_free
            first = runs.take(count)
            assert runs.num_free <= before - count
            assert first >= 0
            assert first + count <= num_blocks
            held[first] = count
        taken = [block for first, count in held.items() for block in range(first, first + count)]
        assert len(taken) == len(set(taken)) <= num_blocks - runs.num_free
        for first in list(held)[:leaving]:
            runs.give_back(first)
            del held[first]
    for first in held:
        runs.give_back(first)
    assert runs.num_free == num_blocks
    largest = num_blocks if make is FirstFit else 1 << (num_blocks.bit_length() - 1)
    assert runs.has_room(largest)
    assert not runs.has_room(num_blocks + 1)


@pytest.mark.parametrize("make", MAKERS)
def test_free_blocks_that_are_no_neighbours_hold_no_run(make: Callable[[int], Runs]) -> None:
    runs = make(8)
    firsts = [runs.take(2) for _ in range(4)]
    for first in firsts[::2]:
        runs.give_back(first)
    assert runs.num_free == 4
    assert runs.has_room(2)
    assert not runs.has_room(3)


def test_a_buddy_takes_a_power_of_two_and_first_fit_what_was_asked_for() -> None:
    buddy, first_fit = Buddy(64), FirstFit(64)
    buddy.take(33)
    first_fit.take(33)
    assert (buddy.num_free, first_fit.num_free) == (0, 31)
