"""Sequences whose tokens are drawn from those that a mask allows: who waits for a mask, and which go with a plan.

What a mask allows depends on all tokens before, so a masked sequence has one token in flight at most: after it, its row
stays out of plans until the next mask has come. Nobody else waits for that.
"""

import numpy as np

from scheduler_svc.core.plan import NO_MASKS, Masks
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.core.state import CoreState

MAX_MASK_BYTES = 1 << 24  # in one plan: no more masked rows run at once than it has room for


class Masking:
    """The only writer of masks and of `awaits_mask`, but for a row's begin."""

    def __init__(self, state: CoreState) -> None:
        self._state = state

    def allow(self, sequence: Sequence, mask: bytes) -> None:
        """The sequence's next token must be one of these."""
        sequence.mask, sequence.mask_len = mask, len(sequence.token_ids)
        if sequence.state is State.RUNNING:
            self._state.columns.awaits_mask[sequence.row] = False

    def room(self, sequence: Sequence) -> int:
        """How many more rows with masks as large as this sequence's may run; at least one may."""
        columns = self._state.columns
        most = max(1, MAX_MASK_BYTES // max(1, len(sequence.mask)))
        return max(0, most - columns.num_masked)

    def of_plan(self, sampling_rows: np.ndarray) -> Masks:
        """The masks of those rows that draw by one; they wait for the next from now on."""
        columns = self._state.columns
        if not columns.num_masked:
            return NO_MASKS
        masked = [row for row in sampling_rows.tolist() if self._state.sequence_in(row).masked]
        columns.awaits_mask[masked] = True
        return Masks(masked, [self._state.sequence_in(row).mask for row in masked])
