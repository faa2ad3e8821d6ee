"""An executor's loop in the test's own process, over a device that computes by itself from one turn to the next.

Everything is real but the network and the time that it takes; a journal has what was asked of the device and sent.
"""

from collections.abc import Callable

from executor_svc.loaded import LoadedModel
from executor_svc.router import Sent
from executor_svc.service import Service
from executor_svc.settings import ExecutorSettings
from executor_svc.simulated.load import load_simulated
from executor_svc.step import PendingStep, Step, StepOutput
from paged.v1 import executor_pb2 as pb
from tests.system.network import Clock, Connection, SimulatedRouter

SETTINGS = ExecutorSettings(
    simulate=True, num_blocks=64, max_rows=8, tokens_per_step=32, simulate_vocab_size=1000,
    session_timeout_s=5.0,
)  # fmt: skip


class Watched:
    """A runner that notes in `journal` when a step is launched, and when its result has been waited for."""

    def __init__(self, loaded: LoadedModel, journal: list[str], *, overlaps: bool) -> None:
        self._runner = loaded.runner
        self._journal = journal
        self._num_steps = 0
        self.overlaps = overlaps
        self.on_launch: Callable[[int], None] = lambda number: None
        self.on_result: Callable[[int], None] = lambda number: None

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def launch(self, step: Step) -> PendingStep:
        self._num_steps += 1
        self._journal.append(f"launch {self._num_steps}")
        self.on_launch(self._num_steps)
        return _Watched(self, self._num_steps, self._runner.launch(step))

    def note_result(self, number: int) -> None:
        self._journal.append(f"result {number}")
        self.on_result(number)


class _Watched:
    def __init__(self, runner: Watched, number: int, pending: PendingStep) -> None:
        self._runner, self._number, self._pending = runner, number, pending

    def result(self) -> StepOutput:
        output = self._pending.result()
        self._runner.note_result(self._number)
        return output


class Router(SimulatedRouter):
    """Notes what is sent, too. A `full` peer does not read."""

    def __init__(self, journal: list[str]) -> None:
        super().__init__()
        self._journal = journal
        self.full: set[bytes] = set()
        self.on_send: Callable[[], None] = lambda: None

    def send(self, peer: bytes, payload: bytes) -> Sent:
        self.on_send()
        message = pb.ToScheduler.FromString(payload)
        kind = message.WhichOneof("message")
        name = self.connections[peer].scheduler_id
        if kind == "result":
            self._journal.append(f"{name}: {message.result.step}")
        elif kind in ("fault", "begun"):
            self._journal.append(f"{name}: {kind} {getattr(message, kind).step}")
        return Sent.FULL if peer in self.full else super().send(peer, payload)


class Executor:
    """`journal`: what the runner was asked for and what was sent, in order."""

    requested = False  # to stop
    is_up = True

    def __init__(
        self, *, overlaps: bool = True, settings: ExecutorSettings = SETTINGS, loaded: LoadedModel | None = None
    ) -> None:
        self.journal: list[str] = []
        self.clock = Clock()
        self.router = Router(self.journal)
        model = loaded or load_simulated(settings)
        self.runner = Watched(model, self.journal, overlaps=overlaps)
        given = LoadedModel(self.runner, model.facts, model.bundle, model.num_blocks, model.warm_up_ms)  # type: ignore[arg-type]
        self.service = Service(settings, given, self.router, self, clock=self.clock)  # type: ignore[arg-type]

    def turn(self) -> list[str]:
        """What is new in the journal after it."""
        before = len(self.journal)
        assert self.service.turn()
        return self.journal[before:]


class Peer:
    """A scheduler's end of a session, by hand."""

    def __init__(self, name: str, executor: Executor) -> None:
        self._executor = executor
        self._step = 0
        self.connection: Connection = executor.router.connect(name, executor.clock)
        self.heard: list[pb.ToScheduler] = []
        self.name = name
        self._num_returned = 0
        self._attach()

    def _attach(self) -> None:
        self._say(pb.ToExecutor(attach=pb.Attach(protocol_version=1, scheduler_id=self.name)))

    def _say(self, message: pb.ToExecutor) -> None:
        self.connection.send(message.SerializeToString())
        self._executor.router.deliver(self.connection)

    def listen(self) -> None:
        while self.connection.to_scheduler:
            self.heard.append(pb.ToScheduler.FromString(self.connection.to_scheduler.popleft()))

    @property
    def attached(self) -> pb.Attached:
        self.listen()
        return [message.attached for message in self.heard if message.HasField("attached")][-1]

    @property
    def num_tokens(self) -> int:
        """Of a step, that it was lent at first and granted since, less what it has returned."""
        self.listen()
        granted = [m.lease_change.granted_tokens_per_step for m in self.heard if m.HasField("lease_change")]
        return self.attached.lease.tokens_per_step + sum(granted) - self._num_returned

    @property
    def is_attached(self) -> bool:
        self.listen()
        return any(message.HasField("attached") for message in self.heard)

    def attach_again(self) -> pb.Attached:
        self._step = 0
        self.heard.clear()
        self._attach()
        self._executor.turn()
        return self.attached

    @property
    def results(self) -> list[pb.StepResult]:
        self.listen()
        return [message.result for message in self.heard if message.HasField("result")]

    def plan(self, plan: pb.StepPlan) -> None:
        self._step += 1
        self._num_returned += plan.returned_tokens_per_step
        plan.epoch, plan.session, plan.step = self.attached.epoch, self.attached.session, self._step
        self._say(pb.ToExecutor(plan=plan))

    def detach(self) -> None:
        self._say(pb.ToExecutor(detach=pb.Detach(session=self.attached.session)))
