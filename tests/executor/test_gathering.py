"""A step waits for sessions that take part in the steps, not for longer than a share of the time that steps take."""

import pytest

from executor_svc.gathering import GATHER_SHARE, MOST_STEPS, Gathering


def test_who_was_in_one_of_the_last_two_steps_is_waited_for() -> None:
    gathering = Gathering()
    gathering.note_step([1, 2], 1.0)
    assert gathering.allowance_s([2]) == pytest.approx(GATHER_SHARE)
    gathering.note_step([1], 1.0)
    assert gathering.allowance_s([2]) > 0
    assert gathering.allowance_s([3]) == 0


def test_who_has_stopped_is_waited_for_no_more() -> None:
    gathering = Gathering()
    for sessions in ([1, 2], [1], [1]):
        gathering.note_step(sessions, 1.0)
    assert gathering.allowance_s([2]) == 0


def test_what_was_waited_is_gone_and_what_was_not_is_kept_for_a_few_steps() -> None:
    gathering = Gathering()
    for _ in range(3):
        gathering.note_step([1, 2], 1.0)
    assert gathering.allowance_s([1]) == pytest.approx(3 * GATHER_SHARE)
    gathering.note_wait(2 * GATHER_SHARE)
    assert gathering.allowance_s([1]) == pytest.approx(GATHER_SHARE)
    gathering.note_wait(1.0)
    assert gathering.allowance_s([1]) == 0
    for _ in range(2 * MOST_STEPS):
        gathering.note_step([1, 2], 1.0)
    assert gathering.allowance_s([1]) == pytest.approx(MOST_STEPS * GATHER_SHARE)
