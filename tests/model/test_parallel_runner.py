"""What rank 0 tells the others arrives as it was, and after a failure nothing is run any more."""

from collections.abc import Iterable
from dataclasses import fields

import numpy as np
import pytest

from executor_svc.model.made_steps import everything, make_step
from executor_svc.model.parallel.codec import decode, encode
from executor_svc.model.parallel.runner import FollowingRunner, LeadingRunner, RanksLost
from executor_svc.step import Draws, Masks, Scored, SharedSegments, Step, StepOutput


def full_step() -> Step:
    """With all that a step may have."""
    step = make_step([3, 1, 4], 4).step
    step.samples = np.array([True, False, True])
    step.draws = Draws(np.array([0, 2, 5], np.int32), np.array([0, 2, 2], np.int32))
    step.masks = Masks(np.array([1], np.int32), np.arange(8, dtype=np.uint8)[None])
    step.scored = Scored(np.array([0, 1]), np.array([7, 8], np.int32), np.array([2, 2]))
    step.copy_sources, step.copy_destinations = np.array([[1, 2]], np.int32)[:, :1], np.empty(0, np.int32)
    ints = [np.array(column, np.int32) for column in ([0], [1], [0, 2], [1, 2], [0, 1, 1])]
    step.shared = SharedSegments(*ints)
    assert all(getattr(step, field.name) is not None for field in fields(step))
    return step


def assert_same(got: object, expected: object) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, np.ndarray):
        assert got.dtype == expected.dtype.newbyteorder("<")
        np.testing.assert_array_equal(got, expected)
    elif isinstance(expected, list):
        for pair in zip(got, expected, strict=True):
            assert_same(*pair)
    elif hasattr(expected, "__dataclass_fields__"):
        for name in expected.__dataclass_fields__:
            assert_same(getattr(got, name), getattr(expected, name))
    else:
        assert got == expected


@pytest.mark.parametrize(
    "value",
    [
        ["reset"],
        ["start_rows", make_step([3, 1], 4, sampling=everything).starts],
        ["fork_rows", np.arange(2, dtype=np.int32), np.arange(2, 4, dtype=np.int32), [everything(1)] * 2, None],
        ["launch", full_step()],
        [np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(3, dtype=">i4")[::-1], np.zeros((0, 4), bool)],
    ],
    ids=["no argument", "starts", "forks", "step", "layouts"],
)
def test_a_call_arrives_as_it_was_made(value: list[object]) -> None:
    message = np.frombuffer(bytearray(encode(value)), np.uint8)
    assert_same(decode(message), value)


@pytest.mark.parametrize("value", [object(), {"a": 1}, np.array([None]), 1.5])
def test_what_has_no_form_is_not_told(value: object) -> None:
    with pytest.raises(TypeError, match="cannot be told"):
        encode([value])


class Noted:
    """A runner that notes its calls; `failing` raises."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[str] = []
        for name in ("start_rows", "fork_rows", "end_rows", "launch", "reset"):
            setattr(self, name, self._noting(name, name == failing, self))
        self.result = self._noting("result", failing == "result", StepOutput(np.array([5], np.int32)))

    def _noting(self, name: str, fails: bool, returned: object):
        def call(*_: object) -> object:
            self.calls.append(name)
            if fails:
                raise ValueError("broken")
            return returned

        call.__name__ = name
        return call


class Wire:
    """What rank 0 has said, to be heard once."""

    def __init__(self, messages: Iterable[bytes] = ()) -> None:
        self.said = list(messages)
        self.closed = False

    def tell(self, message: bytes) -> None:
        self.said.append(message)

    def hear(self) -> np.ndarray:
        return np.frombuffer(self.said.pop(0), np.uint8)

    def close(self) -> None:
        self.closed = True


def test_the_others_make_rank_0s_calls_in_its_order_until_it_closes() -> None:
    wire, own, followed = Wire(), Noted(), Noted()
    leader = LeadingRunner(own, wire)
    made = make_step([2], 4)
    leader.reset()
    assert made.run(leader).sampled_ids.tolist() == [5]
    leader.fork_rows(made.step.rows, made.step.rows, [everything(0)])
    leader.close()
    FollowingRunner(followed, Wire(wire.said)).follow()
    assert followed.calls == own.calls == ["reset", "start_rows", "launch", "result", "end_rows", "fork_rows"]
    assert wire.closed


def test_the_others_see_a_step_to_its_end_before_they_hear_of_what_comes_after_its_launch() -> None:
    """Rank 0 may have rows ended while its device computes."""
    wire, own, followed = Wire(), Noted(), Noted()
    leader, made = LeadingRunner(own, wire), make_step([2], 4)
    pending = leader.launch(made.step)
    leader.end_rows(made.step.rows)
    pending.result()
    leader.close()
    FollowingRunner(followed, Wire(wire.said)).follow()
    assert own.calls == ["launch", "end_rows", "result"]
    assert followed.calls == ["launch", "result", "end_rows"]


@pytest.mark.parametrize(("failing", "called"), [("launch", ["launch"]), ("result", ["launch", "result"])])
def test_nothing_is_run_after_a_failure(failing: str, called: list[str]) -> None:
    wire, own = Wire(), Noted(failing=failing)
    leader = LeadingRunner(own, wire)
    with pytest.raises(RanksLost, match="ValueError: broken"):
        make_step([2], 4).run(leader)
    said = len(wire.said)
    with pytest.raises(RanksLost, match="started anew"):
        leader.reset()
    leader.close()
    assert own.calls == ["start_rows", *called]
    assert len(wire.said) == said
