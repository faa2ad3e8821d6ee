"""On which executor each request is.

A request is in one of three places: with the executor that it was placed on; in `ServedModel.waiting`, while none of
its model can take it; or, if it is suspected of taking executors down, with the one that it took down last.
"""

from collections.abc import Mapping

from scheduler_svc.core.placement import Placement
from scheduler_svc.core.scheduler import Scheduler, scheduler_of
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.driver import Driver
from scheduler_svc.served_model import ServedModel

MAX_MOVES = 64  # of waiting requests to idle executors, in one go


class Dispatch:
    """`driver_of` has the driver of each scheduler that is one's."""

    def __init__(self, driver_of: Mapping[Scheduler, Driver]) -> None:
        self._driver_of = driver_of
        self._placement = Placement()

    def submit(self, sequence: Sequence, model: ServedModel) -> None:
        """Let the sequence wait where it costs least, or where requests wait if no executor can take it."""
        self._choice(sequence, model).submit(sequence)
        self.wake(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """End the sequence now, wherever it is. Harmless if it has ended."""
        if sequence.state is not State.ENDED:
            scheduler_of(sequence).cancel(sequence)
            self.wake(sequence)

    def wake(self, sequence: Sequence) -> None:
        """Something has changed about it: where it is, plan soon."""
        driver = self._driver_of.get(scheduler_of(sequence))
        if driver is not None:
            driver.wake()

    def scatter(self, scheduler: Scheduler, model: ServedModel, *, suspects: bool) -> None:
        """Who waits with an executor that is lost waits elsewhere; those that must be computed alone only if so told:
        what took down one executor must not go on to the next. Those whose tokens are on the way stay for now."""
        for sequence in list(scheduler.state.queue):
            if (suspects or not sequence.alone) and not sequence.num_owed:
                self._move(sequence, self._choice(sequence, model))

    def vacate(self, scheduler: Scheduler, model: ServedModel) -> None:
        """What runs with an executor that is about to stop waits, as far as another can go on with it. `scatter` moves
        it as its last tokens come."""
        for sequence in scheduler.running():
            if self._choice(sequence, model) is not model.waiting:
                scheduler.preempt(sequence)
                self.wake(sequence)

    def place_waiting(self, model: ServedModel) -> list[Sequence]:
        """Who waits for an executor of the model gets one. Returns those for whom those there are are too small."""
        too_large = []
        for sequence in list(model.waiting.state.queue) if model.executors else ():
            scheduler = self._choice(sequence, model)
            if scheduler is model.waiting:
                too_large.append(sequence)
            else:
                self._move(sequence, scheduler)
        return too_large

    def relieve(self, model: ServedModel) -> None:
        """Some of those who wait with a busy executor start at once with an idle one."""
        for _ in range(MAX_MOVES if len(model.executors) > 1 else 0):
            found = self._placement.relief(model.schedulers)
            if found is None:
                return
            self._move(*found)

    def _choice(self, sequence: Sequence, model: ServedModel) -> Scheduler:
        return self._placement.choose(sequence, model.schedulers) or model.waiting

    def _move(self, sequence: Sequence, scheduler: Scheduler) -> None:
        before = scheduler_of(sequence)
        if before is not scheduler:
            before.move(sequence, scheduler)
            self.wake(sequence)
