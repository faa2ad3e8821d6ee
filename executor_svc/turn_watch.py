"""Ends the process where a turn of its loop does not end: schedulers have given it up by then, and only a new one is of
any use."""

import threading
import time
from collections.abc import Callable

TICK_S = 0.25
PATIENCE = 6  # times the worst step so far: schedulers give up after five


class TurnWatch:
    """`begin` before a turn, `end` after it, on one thread. A turn waits for one step at most. One that takes more than
    `timeout_s`, and more than a few times the worst step before it, is reported to `on_stuck` once, on another thread.

    Only time in which this process runs is counted: one that was frozen, or starved, is not to blame for it.
    """

    def __init__(self, timeout_s: float, on_stuck: Callable[[float], None]) -> None:
        self._timeout_s = timeout_s
        self._on_stuck = on_stuck
        self._limit_s = timeout_s
        self._num_begun = self._num_ended = 0

    def start(self) -> None:
        threading.Thread(target=self._watch, name="turn watch", daemon=True).start()

    def begin(self, worst_step_s: float) -> None:
        self._limit_s = max(self._timeout_s, PATIENCE * worst_step_s)
        self._num_begun += 1

    def end(self) -> None:
        self._num_ended = self._num_begun

    def _watch(self) -> None:
        watched, spent_s, before = 0, 0.0, time.monotonic()
        while True:
            time.sleep(TICK_S)
            now = time.monotonic()
            passed_s, before = min(now - before, 2 * TICK_S), now
            current = self._num_begun
            if current == self._num_ended or current != watched:
                watched, spent_s = current, 0.0
                continue
            spent_s += passed_s
            if spent_s > self._limit_s:
                self._on_stuck(spent_s)
                return
