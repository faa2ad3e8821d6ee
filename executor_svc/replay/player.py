"""Takes a recording's entries through a resident batch and a runner, as the service took them.

K/V that were computed before the recording began are computed again first: those of the rows that a keyframe names, and
those of cached prefixes when a row starts on them. Who owned a block or a row is not known any more; whoever names it
does.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from executor_svc.applied_plan import AppliedPlan
from executor_svc.batch import ResidentBatch
from executor_svc.intake import Intake
from executor_svc.leases import Lease, Ownership
from executor_svc.plan import PlanViolation, read_int32s, read_plan
from executor_svc.plan_checks import Limits
from executor_svc.replay.ids import Ids
from executor_svc.results import asked_logprobs, fill_results
from executor_svc.step import Int32s, Runner
from executor_svc.stepper import Stepper
from paged.v1 import executor_pb2, recording_pb2

SPARE_ROWS = 1  # that a runner needs beyond those of the recording
_REBUILDING = 1 << 62  # the session of the rows in which old K/V are computed


@dataclass(frozen=True, slots=True)
class Played:
    """One step, or what was refused: the plans, what the recording says came of them, and what came of them now."""

    step: int
    plans: list[executor_pb2.StepPlan]
    recorded: list[executor_pb2.StepResult]  # none where the step did not end
    results: list[executor_pb2.StepResult]


class Player:
    """`play` entries one by one, the keyframe that they begin with first."""

    def __init__(self, header: recording_pb2.RecordingHeader, runner: Runner, ids: Ids) -> None:
        """`runner` has as many blocks as the header says, and SPARE_ROWS rows more."""
        facts = header.model
        self._ids = ids
        self._spare_row = header.max_rows
        self._tokens_per_step = header.tokens_per_step
        self._block_size = facts.block_size
        self._ownership = Ownership(header.max_rows + SPARE_ROWS, header.num_blocks, header.tokens_per_step)
        limits = Limits(facts.vocab_size, facts.max_model_len, facts.block_size, facts.rope_switch_len)
        self._batch = ResidentBatch(self._ownership, limits)
        self._runner = runner
        self._stepper = Stepper(self._batch, runner)
        self._intakes: dict[int, Intake] = {}
        self._sessions: set[int] = set()
        self._is_written = np.zeros(header.num_blocks, np.bool_)  # blocks whose K/V are of this replay
        self._has_begun = False

    def play(self, entry: recording_pb2.RecordingEntry) -> Played | None:
        """What an entry that is a step has come to. Raises RunnerFailed, PlanViolation."""
        match entry.WhichOneof("entry"):
            case "keyframe":
                self._settle()
                if not self._has_begun:
                    self._restore(entry.keyframe)
                self._has_begun = True
            case "step":
                return self._play_step(entry.step)
            case "ended_session":
                self._end(entry.ended_session.session)
            case "refused_plan":
                self._take(entry.refused_plan.plan)
        return None

    def _play_step(self, step: recording_pb2.RecordedStep) -> Played:
        plans = [merged.plan for merged in step.plans]
        applied = [self._take(plan) for plan in plans]
        for taken in applied:
            self._is_written[taken.step.slots // self._block_size] = True
            self._is_written[taken.step.copy_destinations] = True
        asked = asked_logprobs(self._batch, applied)
        output = self._stepper.run(applied)
        results = [executor_pb2.StepResult() for _ in plans]
        fill_results(applied, asked, output, results)
        for plan in plans:
            self._intakes[plan.session].prepare()
        return Played(step.step, plans, [m.result for m in step.plans if m.HasField("result")], results)

    def _take(self, plan: executor_pb2.StepPlan) -> AppliedPlan:
        self._ids.fill(plan)
        for started in plan.started:
            self._rebuild_prefix(started)
        self._claim(plan.session, _rows_of(plan), _blocks_of(plan))
        intake = self._intakes.get(plan.session)
        if intake is None:
            intake = self._intakes[plan.session] = Intake(self._batch, plan.session)
        return intake.take(plan)

    def _settle(self) -> None:
        """As the recorder has it done before a keyframe."""
        for intake in self._intakes.values():
            intake.settle()

    def _end(self, session: int) -> None:
        self._intakes.pop(session, None)
        self._stepper.end_rows(self._batch.end_rows_of(session))

    def _claim(self, session: int, rows: Iterable[int], blocks: Iterable[int]) -> None:
        """The session owns these from now on, as far as they exist."""
        tokens = 0 if session in self._sessions else self._tokens_per_step
        self._sessions.add(session)
        num_rows, num_blocks = len(self._ownership.of_row), len(self._ownership.of_block)
        own_rows = np.array([row for row in rows if 0 <= row < num_rows], np.int32)
        own_blocks = np.array([block for block in blocks if 0 < block < num_blocks], np.int32)
        self._ownership.lend(session, Lease(own_blocks, own_rows, tokens))

    # --- K/V from before ---

    def _restore(self, keyframe: recording_pb2.Keyframe) -> None:
        for live in keyframe.rows:
            self._ids.fill_started(live.row)
            self._restore_row(live)

    def _restore_row(self, live: recording_pb2.LiveRow) -> None:
        """A row that ends sampled, and of whose tokens nothing else depends, is left so: with a token that was drawn
        and that only the runner knows. Forks may ask for that."""
        row, sampling = live.row.row, live.row.sampling
        ids = np.frombuffer(live.row.token_ids, "<i4")
        started = executor_pb2.StartedRow()
        started.CopyFrom(live.row)
        ends_sampled = live.ends_sampled and not _remembers(sampling)
        if ends_sampled:
            started.token_ids = ids[:-1].tobytes()
        self._compute(live.session, started, live.row.num_computed_tokens, samples=ends_sampled)
        if ends_sampled:
            own = np.array([row], np.int32)
            self._runner.fork_rows(own, own, [sampling], ids[-1:].astype(np.int32))

    def _rebuild_prefix(self, started: executor_pb2.StartedRow) -> None:
        """Compute what a row begins on, unless it has been computed in this replay."""
        num_computed = started.num_computed_tokens
        blocks = read_int32s("started.blocks", started.blocks)[: -(-num_computed // self._block_size)]
        if not len(blocks) or (blocks >= len(self._is_written)).any() or self._is_written[blocks].all():
            return
        again = executor_pb2.StartedRow()
        again.CopyFrom(started)
        again.row = self._spare_row
        again.sampling.ClearField("prompt_logprobs")
        self._compute(_REBUILDING, again, num_computed, samples=False)
        ended = executor_pb2.StepPlan(ended_rows=_column([self._spare_row]))
        self._stepper.run([self._batch.apply(read_plan(ended), _REBUILDING)])

    def _compute(self, session: int, started: executor_pb2.StartedRow, num_tokens: int, *, samples: bool) -> None:
        """Start the row from its first position on, and compute so many."""
        blocks = read_int32s("started.blocks", started.blocks)
        self._claim(session, [started.row], blocks.tolist())
        started.num_computed_tokens = 0
        plan = executor_pb2.StepPlan(started=[started])
        left = num_tokens
        while True:
            count = min(left, self._tokens_per_step)
            left -= count
            if count:
                plan.scheduled_rows, plan.scheduled_tokens = _column([started.row]), _column([count])
                plan.scheduled_samples = bytes([samples and not left])
            self._stepper.run([self._batch.apply(read_plan(plan), session)])
            if not left:
                break
            plan = executor_pb2.StepPlan()
        self._is_written[blocks[: -(-num_tokens // self._block_size)]] = True


def _remembers(sampling: executor_pb2.RowSampling) -> bool:
    """Whether a runner may keep the row's tokens for its sampling."""
    penalty = sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    return penalty or bool(sampling.banned_ids)


def _rows_of(plan: executor_pb2.StepPlan) -> list[int]:
    named = [plan.fork_parents, plan.fork_children, plan.ended_rows, plan.appended_rows, plan.copy_rows]
    rows = [row for column in (*named, plan.scheduled_rows) for row in _read(column)]
    return rows + [started.row for started in plan.started] + [joined.row for joined in plan.joined]


def _blocks_of(plan: executor_pb2.StepPlan) -> list[int]:
    named = [plan.appended_blocks, plan.copy_sources, plan.copy_destinations]
    return [block for column in (*named, *(started.blocks for started in plan.started)) for block in _read(column)]


def _read(column: bytes) -> list[int]:
    try:
        ids: list[int] = read_int32s("", column).tolist()
    except PlanViolation:  # which the batch will find, too
        return []
    return ids


def _column(ids: list[int] | Int32s) -> bytes:
    return np.asarray(ids, "<i4").tobytes()
