"""Results that belong to no plan are refused."""

import numpy as np
import pytest

from scheduler_svc.core.plan import Lease, Result
from scheduler_svc.core.results import ResultMismatch
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, TokenLogprobs


def test_a_result_of_another_plan_is_refused() -> None:
    scheduler = Scheduler()
    scheduler.attach(Lease(list(range(1, 9)), [0], 16, 4, vocab_size=50))
    with pytest.raises(ResultMismatch):
        scheduler.apply(Result(1, np.zeros(0, np.int32)))
    scheduler.submit(Sequence("a", [1, 2, 3], 3))
    scheduler.plan()
    with pytest.raises(ResultMismatch):
        scheduler.apply(Result(2, np.array([5], np.int32)))
    with pytest.raises(ResultMismatch):
        scheduler.apply(Result(1, np.array([5, 6], np.int32)))
    with pytest.raises(ResultMismatch):
        scheduler.apply(Result(1, np.array([50], np.int32)))
    assert scheduler.apply(Result(1, np.array([5], np.int32))).updated[0].token_ids == [1, 2, 3, 5]


def test_log_probabilities_of_who_asks_for_none_are_refused() -> None:
    scheduler = Scheduler()
    scheduler.attach(Lease(list(range(1, 9)), [0], 16, 4))
    scheduler.submit(Sequence("a", [1, 2, 3], 3))
    scheduler.plan()
    with pytest.raises(TypeError, match="asks for none"):
        scheduler.apply(Result(1, np.array([5], np.int32), [TokenLogprobs(-0.5, 1, [], [])]))
