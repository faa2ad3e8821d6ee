"""What the executor did last: a bounded ring of plans and results, and how it goes to a file when something has failed.

The ring is a few parts, each a keyframe and the steps behind it. Messages are kept as they came and as they went, so a
step costs a reference to each; only a file is made of them.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog

from executor_svc.applied_plan import AppliedPlan
from executor_svc.batch import ResidentBatch
from executor_svc.leases import Ownership
from executor_svc.recording.files import RecordingFiles
from executor_svc.recording.rows import RecordedRows, Snapshot
from executor_svc.step import StepOutput
from paged.v1 import executor_pb2, recording_pb2

KEYFRAME_STEPS = 256
_PARTS = 3  # of the ring; the oldest goes when one more begins
_ENTRY_BYTES = 256  # what a step takes besides its messages, about

_log = structlog.get_logger()


@dataclass(slots=True)
class Taken:
    """A plan that the batch has taken, of this session."""

    session: int
    plan: executor_pb2.StepPlan
    applied: AppliedPlan


class Recorder(Protocol):
    """What the service tells. All of it on the service's thread, but for `write`, which may be called on any while the
    service's hangs. Writing keeps nobody waiting unless it is told to."""

    def before_step(self, settle: Callable[[], None]) -> None:
        """Plans will be taken. `settle` has the batch know all that was taken so far."""

    def begin(self, taken: Sequence[Taken]) -> None:
        """The step of these plans begins."""

    def end(self, output: StepOutput, results: Sequence[executor_pb2.StepResult]) -> None:
        """It has ended; a result for each plan, which may be completed later."""

    def refused(self, plan: executor_pb2.StepPlan, reason: str) -> None:
        """A plan broke a rule. Writes a file."""

    def session_ended(self, session: int) -> None:
        """Its rows are free."""

    def epoch_ended(self) -> None:
        """Nothing of what was recorded is there any more."""

    def write(self, reason: str, *, wait: bool = False) -> None:
        """Put what is there into a file, soon; or now, and return when it is done."""

    def finish(self, timeout_s: float) -> None:
        """Wait for the file that is being written, no longer than this."""


class _NoRecorder:
    def before_step(self, settle: Callable[[], None]) -> None: ...
    def begin(self, taken: Sequence[Taken]) -> None: ...
    def end(self, output: StepOutput, results: Sequence[executor_pb2.StepResult]) -> None: ...
    def refused(self, plan: executor_pb2.StepPlan, reason: str) -> None: ...
    def session_ended(self, session: int) -> None: ...
    def epoch_ended(self) -> None: ...
    def write(self, reason: str, *, wait: bool = False) -> None: ...
    def finish(self, timeout_s: float) -> None: ...


NO_RECORDER: Recorder = _NoRecorder()


@dataclass(slots=True)
class _Step:
    number: int
    plans: list[executor_pb2.StepPlan]
    results: Sequence[executor_pb2.StepResult] = ()

    def message(self) -> recording_pb2.RecordingEntry:
        step = recording_pb2.RecordedStep(step=self.number)
        for i, plan in enumerate(self.plans):
            step.plans.add(plan=plan, result=self.results[i] if self.results else None)
        return recording_pb2.RecordingEntry(step=step)


@dataclass(slots=True)
class _Part:
    keyframe: Snapshot
    entries: list[_Step | recording_pb2.RecordingEntry] = field(default_factory=list)
    num_steps: int = 0
    num_bytes: int = 0  # of the entries


class Recording:
    """A `Recorder`. `header` says what the executor is; its reason and time are filled in here. `max_bytes` bounds what
    plans and results take; keyframes come on top, at most as much as tables and ids of the live rows."""

    def __init__(
        self,
        batch: ResidentBatch,
        ownership: Ownership,
        files: RecordingFiles,
        header: Callable[[], recording_pb2.RecordingHeader],
        *,
        max_bytes: int,
    ) -> None:
        self._rows = RecordedRows(batch, ownership, with_ids=files.with_ids)
        self._files = files
        self._header = header
        self._max_part_bytes = max_bytes // _PARTS
        self._parts: deque[_Part] = deque(maxlen=_PARTS)
        self._taken: Sequence[Taken] = ()
        self._step: _Step | None = None  # that has begun
        self._num_steps = 0

    def before_step(self, settle: Callable[[], None]) -> None:
        part = self._parts[-1] if self._parts else None
        if part is None or part.num_steps >= KEYFRAME_STEPS or part.num_bytes > self._max_part_bytes:
            settle()
            self._begin_part()

    def begin(self, taken: Sequence[Taken]) -> None:
        for one in taken:
            self._rows.note_changes(one.applied.changes)
        self._num_steps += 1
        self._taken = taken
        part = self._parts[-1]
        self._step = _Step(self._num_steps, [one.plan for one in taken])
        part.entries.append(self._step)
        part.num_steps += 1
        part.num_bytes += _ENTRY_BYTES + sum(one.plan.ByteSize() for one in taken)

    def end(self, output: StepOutput, results: Sequence[executor_pb2.StepResult]) -> None:
        if self._step is not None:  # sessions may have ended since it began, and stand behind it
            self._step.results = results
        self._parts[-1].num_bytes += sum(result.ByteSize() for result in results)
        begin = 0
        for one in self._taken:
            rows = one.applied.step.drawing_rows
            self._rows.note_tokens(rows, output.sampled_ids[begin : begin + len(rows)])
            begin += len(rows)
        self._taken, self._step = (), None

    def refused(self, plan: executor_pb2.StepPlan, reason: str) -> None:
        refused = recording_pb2.RefusedPlan(plan=plan, reason=reason)
        self._add(recording_pb2.RecordingEntry(refused_plan=refused))
        self.write(reason)

    def session_ended(self, session: int) -> None:
        ended = recording_pb2.EndedSession(session=session)
        self._add(recording_pb2.RecordingEntry(ended_session=ended))

    def epoch_ended(self) -> None:
        self._parts.clear()
        self._taken, self._step = (), None

    def write(self, reason: str, *, wait: bool = False) -> None:
        if not self._parts:
            return
        header = self._header()
        header.reason, header.written_at_ns = reason, time.time_ns()
        parts = [replace(part, entries=list(part.entries)) for part in self._parts]
        self._files.write(_messages(header, parts), wait=wait)

    def finish(self, timeout_s: float) -> None:
        self._files.finish(timeout_s)

    def _add(self, entry: recording_pb2.RecordingEntry) -> None:
        if self._parts:
            self._parts[-1].entries.append(entry)
            self._parts[-1].num_bytes += _ENTRY_BYTES + entry.ByteSize()

    def _begin_part(self) -> None:
        self._parts.append(_Part(self._rows.snapshot(self._num_steps + 1)))


def _messages(header: recording_pb2.RecordingHeader, parts: list[_Part]) -> Iterator[recording_pb2.RecordingEntry]:
    yield recording_pb2.RecordingEntry(header=header)
    for part in parts:
        yield recording_pb2.RecordingEntry(keyframe=part.keyframe.message())
        for entry in part.entries:
            yield entry.message() if isinstance(entry, _Step) else entry
