"""A schedule that repeats itself: the decode steps of the same rows, one after another.

While nothing begins or ends, each plan names the same rows with one token each, and blocks for those whose last one is
full. Its step then follows from the step before, and what the rules say of rows holds as it did: it is not looked up,
checked and laid out anew for every token.
"""

from dataclasses import dataclass, replace

import numpy as np

from executor_svc.batch import ResidentBatch
from executor_svc.plan import read_int32s
from executor_svc.step import Step
from executor_svc.step_builder import widened
from paged.v1 import executor_pb2

_SPARE_ENTRIES = 16
_NONE = np.empty(0, np.int32)


@dataclass(slots=True)
class _Due:
    """Rows that need a block in the same step, which they do again each time that block is full."""

    rows: bytes  # as the plan has to name them, in the schedule's order
    places: np.ndarray  # in the schedule
    entries: np.ndarray  # of the flattened tables, where the blocks go


class DecodeRun:
    """Begins after a step in which every row has caught up and sampled. Until `settle`, what the batch should know of
    these rows is kept here.

    `_next` is the step to come, complete but for the blocks that its plan brings: it can be laid out before that plan
    has come.
    """

    def __init__(self, batch: ResidentBatch, session: int, step: Step) -> None:
        num_rows = len(step.rows)
        self._batch = batch
        self._session = session
        self._block_size = batch.block_size
        self._num_steps = 0
        self._longest = int(step.context_lens.max())
        self._tables = widened(step.block_tables, step.block_tables.shape[1] + _SPARE_ENTRIES)
        # A token that is sampled takes one more position.
        self._most = min(batch.max_model_len - 1, self._tables.shape[1] * batch.block_size)
        is_short = batch.num_known.take(step.rows) <= batch.rope_switch_len
        if is_short.any():
            # Those rows may not pass that length; all rows get on together.
            room = batch.rope_switch_len - int(step.context_lens[is_short].max())
            self._most = min(self._most, self._longest + room)
        self._scheduled_rows = step.rows.tobytes()
        self._scheduled_tokens = np.ones(num_rows, np.int32).tobytes()
        self._scheduled_samples = b"\1" * num_rows
        self._last = replace(
            step,
            query_start=np.arange(num_rows + 1, dtype=np.int32),
            token_ids=np.full(num_rows, -1, np.int32),
            slots=step.slots.take(step.query_start[1:] - 1),
            # Of blocks that are full already, which is all that can be shared: it stays so while the run lasts.
            shared=batch.shared_segments(step.rows, np.ones(num_rows, np.int32), step.context_lens + 1),
        )
        self._due_at: list[_Due | None] = [None] * batch.block_size
        self._next: Step | None = None

    @staticmethod
    def may_follow(batch: ResidentBatch, step: Step) -> bool:
        """Whether every row has caught up and has no block ahead of its need."""
        if not len(step.rows) or not step.all_draw:
            return False
        return np.array_equal(batch.num_blocks.take(step.rows), -(-step.context_lens // batch.block_size))

    def repeats(self, plan: executor_pb2.StepPlan) -> bool:
        """Whether the plan is one more step of the same rows that breaks no rule."""
        return (
            self._longest < self._most
            and plan.scheduled_rows == self._scheduled_rows
            and plan.scheduled_tokens == self._scheduled_tokens
            and plan.scheduled_samples == self._scheduled_samples
            and plan.appended_rows == self._due().rows
            and not (
                plan.ended_rows
                or plan.started
                or plan.joined
                or plan.fork_parents
                or plan.fork_children
                or plan.fork_sampling
                or plan.fork_tokens
            )
            and not (plan.copy_rows or plan.copy_sources or plan.copy_destinations)
            and not (plan.mask_rows or plan.masks)
            and not (plan.returned_blocks or plan.returned_rows or plan.returned_tokens_per_step)
            and len(plan.appended_blocks) == len(plan.appended_rows)
            and self._batch.owns_blocks(self._session, read_int32s("appended_blocks", plan.appended_blocks))
        )

    def next_step(self, plan: executor_pb2.StepPlan) -> Step:
        """The step of a plan that `repeats`."""
        step = self._next or self._lay_out()
        if plan.appended_blocks:
            blocks = read_int32s("appended_blocks", plan.appended_blocks)
            due = self._due()
            step.slots[due.places] = blocks.astype(np.int64) * self._block_size
            self._tables.reshape(-1)[due.entries] = blocks
            due.entries += 1
        self._num_steps += 1
        self._longest += 1
        self._last, self._next = step, None
        return step

    def prepare(self) -> None:
        """Lay the next step out, as far as it is known. To be called when there is time."""
        self._due()
        self._next = self._lay_out()

    def _lay_out(self) -> Step:
        last = self._last
        return Step(
            rows=last.rows,
            query_start=last.query_start,
            token_ids=last.token_ids,
            positions=last.context_lens,
            slots=last.slots + 1,
            block_tables=self._tables[:, : self._longest // self._block_size + 1],
            context_lens=last.context_lens + 1,
            samples=last.samples,
            copy_sources=_NONE,
            copy_destinations=_NONE,
            decodes=True,
            shared=last.shared,
        )

    def settle(self) -> None:
        """Tell the batch what has become of the rows. The run is over."""
        if self._num_steps:
            self._batch.advance(self._last.rows, self._last.context_lens, self._num_steps, self._last.block_tables)

    def _due(self) -> _Due:
        """Rows whose blocks are full before the next step."""
        phase = self._longest % self._block_size
        due = self._due_at[phase]
        if due is None:
            due = self._due_at[phase] = self._find_due()
        return due

    def _find_due(self) -> _Due:
        positions = self._last.context_lens
        places = (positions % self._block_size == 0).nonzero()[0]
        entries = places * self._tables.shape[1] + positions.take(places) // self._block_size
        return _Due(self._last.rows.take(places).tobytes(), places, entries)
