"""A small scheduler's end of the plan stream: one session on one socket.

As a program (`python -m tests.executor.client ENDPOINT SCHEDULER_ID`) it attaches, prints its session number and then
holds the session until its stdin ends or it is killed.
"""

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Self

import zmq

from executor_svc.sessions import PROTOCOL_VERSION
from paged.v1.executor_pb2 import (
    Attach,
    Attached,
    Detach,
    Fault,
    LeaseChange,
    StepPlan,
    StepResult,
    ToExecutor,
    ToScheduler,
)

TIMEOUT_S = 10.0


class PlanClient:
    """Sends plans and reads what comes back; every wait ends with an AssertionError after TIMEOUT_S."""

    def __init__(self, endpoint: str, guard: Callable[[zmq.Socket], None] = lambda socket: None) -> None:
        """`guard` is given the socket before it connects."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        guard(self._socket)
        self._socket.connect(endpoint)
        self.attached = Attached()
        self.step = 0
        self.changes: deque[LeaseChange] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def send_bytes(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def send(self, **message: object) -> None:
        self._socket.send(ToExecutor(**message).SerializeToString())

    def receive(self, timeout_s: float = TIMEOUT_S) -> ToScheduler:
        """The next message that says something: an executor that wonders whether we are there sends empty ones. Changes
        of the lease are put by."""
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            if self._socket.poll(left * 1e3):
                message = ToScheduler.FromString(self._socket.recv())
                if message.HasField("lease_change"):
                    self.changes.append(message.lease_change)
                elif message.WhichOneof("message"):
                    return message
        raise AssertionError(f"nothing received in {timeout_s} s")

    def change(self) -> LeaseChange:
        """The next change of the lease; nothing else may come before it."""
        end = time.monotonic() + TIMEOUT_S
        while not self.changes:
            assert self._socket.poll(max(0, end - time.monotonic()) * 1e3), "no change of the lease"
            message = ToScheduler.FromString(self._socket.recv())
            if message.WhichOneof("message"):
                assert message.HasField("lease_change"), message
                self.changes.append(message.lease_change)
        return self.changes.popleft()

    def is_kept_waiting(self) -> bool:
        """The executor's answer to our Attach is to see whether we are still there."""
        assert self._socket.poll(TIMEOUT_S * 1e3)
        return self._socket.recv() == b""

    def hears_nothing(self, timeout_s: float) -> bool:
        try:
            self.receive(timeout_s)
        except AssertionError:
            return True
        return False

    def ask_to_attach(self, scheduler_id: str, version: int = PROTOCOL_VERSION) -> None:
        self.send(attach=Attach(protocol_version=version, scheduler_id=scheduler_id))

    def attach(self, scheduler_id: str = "one") -> Attached:
        self.ask_to_attach(scheduler_id)
        return self.wait_attached()

    def wait_attached(self) -> Attached:
        message = self.receive()
        assert message.HasField("attached"), message
        self.attached, self.step = message.attached, 0
        return self.attached

    def send_plan(self, plan: StepPlan | None = None, **changes: int) -> None:
        """With the numbers of the session's next plan, but for `changes`."""
        self.step += 1
        numbered = StepPlan(epoch=self.attached.epoch, session=self.attached.session, step=self.step)
        numbered.MergeFrom(plan or StepPlan())
        for name, value in changes.items():
            setattr(numbered, name, value)
        self.send(plan=numbered)

    def result(self) -> StepResult:
        message = self.receive()
        assert message.HasField("result"), message
        return message.result

    def run(self, plan: StepPlan | None = None) -> StepResult:
        self.send_plan(plan)
        result = self.result()
        assert (result.epoch, result.session, result.step) == (self.attached.epoch, self.attached.session, self.step)
        return result

    def fault(self) -> Fault:
        message = self.receive()
        assert message.HasField("fault"), message
        return message.fault

    def detach(self) -> None:
        self.send(detach=Detach(session=self.attached.session))


if __name__ == "__main__":
    with PlanClient(sys.argv[1]) as client:
        print(client.attach(sys.argv[2]).session, flush=True)
        sys.stdin.read()
