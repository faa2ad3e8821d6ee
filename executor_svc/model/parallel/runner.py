"""The runners of one executor's ranks. All make the same calls in the same order: rank 0 those that it is asked for,
the others what rank 0 tells them. Each computes its share of every layer, and meets the others inside the model.

Every rank samples, from equal logits; the tokens that count are rank 0's (`Group.agreed`). So what a runner does
follows from its calls alone, and no rank can come to wait for one that went another way. When one fails, or does not
answer in time, there is no way back to a common state: all end, and are started anew.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import structlog

from executor_svc.model.parallel.codec import decode, encode
from executor_svc.model.parallel.group import ProcessGroup
from executor_svc.ranks import RanksLost
from executor_svc.step import Int32s, PendingStep, RowStart, Runner, Step, StepOutput
from paged.v1 import executor_pb2

log = structlog.get_logger(__name__)

_CLOSE = "close"
_T = TypeVar("_T")


class LeadingRunner:
    """Rank 0's `executor_svc.step.Runner`: `own` is its share. After a failure every call raises RanksLost."""

    def __init__(self, own: Runner, group: ProcessGroup) -> None:
        self._own = own
        self._group = group
        self._lost = False

    def start_rows(self, starts: list[RowStart]) -> None:
        self._together(self._own.start_rows, starts)

    def fork_rows(
        self,
        parents: Int32s,
        children: Int32s,
        sampling: list[executor_pb2.RowSampling],
        tokens: Int32s | None = None,
    ) -> None:
        self._together(self._own.fork_rows, parents, children, sampling, tokens)

    def end_rows(self, rows: Int32s) -> None:
        self._together(self._own.end_rows, rows)

    @property
    def overlaps(self) -> bool:
        return self._own.overlaps

    def launch(self, step: Step) -> "_PendingStep":
        return _PendingStep(self._together(self._own.launch, step), self._guarded)

    def reset(self) -> None:
        self._together(self._own.reset)

    def close(self) -> None:
        """The other ranks end, and nothing more can be run."""
        if self._lost:
            return
        self._lost = True
        try:
            self._group.tell(encode([_CLOSE]))
            self._group.close()
        except RuntimeError as error:
            log.warning("ranks_not_told_to_end", reason=str(error))  # they are gone, or see their connections break

    def _together(self, call: Callable[..., _T], *arguments: Any) -> _T:
        def tell_and_call() -> _T:
            self._group.tell(encode([call.__name__, *arguments]))
            return call(*arguments)

        return self._guarded(tell_and_call)

    def _guarded(self, call: Callable[[], _T]) -> _T:
        if self._lost:
            raise RanksLost("the ranks of this executor were lost; all must be started anew")
        try:
            return call()
        except Exception as error:
            self._lost = True
            raise RanksLost(
                f"a rank failed, ended or did not answer within rank_timeout_s: {type(error).__name__}: {error}"
            ) from error


class _PendingStep:
    """Of which the other ranks wait for their share by themselves."""

    def __init__(self, own: PendingStep, guarded: Callable[[Callable[[], StepOutput]], StepOutput]) -> None:
        self._own = own
        self._guarded = guarded

    def result(self) -> StepOutput:
        return self._guarded(self._own.result)


class FollowingRunner:
    """What any other rank does: what rank 0 tells it, with its own share `own`."""

    def __init__(self, own: Runner, group: ProcessGroup) -> None:
        self._own = own
        self._calls: dict[str, Callable[..., object]] = {
            call.__name__: call for call in (own.start_rows, own.fork_rows, own.end_rows, own.reset)
        }
        self._calls[own.launch.__name__] = self._run
        self._group = group

    def follow(self) -> None:
        """Returns when rank 0 closes. Whatever is raised means that the executor is lost; RanksLost, that rank 0 is."""
        while True:
            try:
                heard = self._group.hear()
            except RuntimeError as error:
                raise RanksLost(f"rank 0 ended without a word: {error}") from error
            name, *arguments = decode(heard)
            if name == _CLOSE:
                self._group.close()
                return
            self._calls[name](*arguments)

    def _run(self, step: Step) -> None:
        """To its end: what fails here shows now, and not in what comes next."""
        self._own.launch(step).result()
