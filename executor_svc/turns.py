"""Whose plans a step takes: one of every session that has one at hand, or a single one that is to be computed alone.

Exclusive plans and those of all others take turns: neither is kept waiting for more than one step of the other kind,
however many sessions there are. Several sessions with exclusive plans take turns among themselves.
"""

from collections import deque
from collections.abc import Iterable
from typing import Protocol, TypeVar

from paged.v1 import executor_pb2


class HasPlans(Protocol):
    """`plans` were received and not yet issued."""

    plans: deque[executor_pb2.StepPlan]


S = TypeVar("S", bound=HasPlans)


class Turns:
    """Remembers what the last step was."""

    def __init__(self) -> None:
        self._was_exclusive = False

    def next_step(self, sessions: Iterable[S]) -> list[S]:
        """Of these sessions, in this order, those whose first plan is in the next step: one that is exclusive, or as
        many as have another."""
        ready = [session for session in sessions if session.plans]
        merged = [session for session in ready if not session.plans[0].exclusive]
        alone = next((session for session in ready if session.plans[0].exclusive), None)
        self._was_exclusive = alone is not None and not (merged and self._was_exclusive)
        return [alone] if alone is not None and self._was_exclusive else merged
