"""One attachment of a scheduler: what has come of it, and what is on its way to it."""

from collections import deque
from dataclasses import dataclass, field

from executor_svc.intake import Intake
from paged.v1 import executor_pb2


@dataclass(slots=True, eq=False)
class Session:
    """`plans` were received and not yet issued. `result` is of the plan that was issued last, and is still to be sent:
    before anything else that is said of the session. `num_in_time` steps in a row had its next plan at hand when they
    ended."""

    number: int
    scheduler_id: str
    peer: bytes
    intake: Intake
    last_heard: float  # seconds of the service's clock
    next_step: int = 1
    issued_step: int = 0
    plans: deque[executor_pb2.StepPlan] = field(default_factory=deque)
    result: executor_pb2.ToScheduler | None = None
    num_in_time: int = 0
