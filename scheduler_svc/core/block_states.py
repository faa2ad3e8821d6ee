"""What each block is used for, as one column for those who look on; and what has changed since they looked."""

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.flat import view
from scheduler_svc.core.state import CoreState

NOT_LENT, BLANK, CACHED = range(3)
HELD_BY_NONE = 2  # a block that c tables hold is HELD_BY_NONE + c, up to the largest byte
MOST = 255
GAP = 16  # unchanged blocks that do not divide a run: a run costs about as many bytes by itself

States = NDArray[np.uint8]


def block_states(state: CoreState) -> States:
    """uint8 [num_blocks], by block id. Costs a pass over all blocks."""
    pool = state.cache.pool
    counts, leased = view(pool.ref_count), view(pool.is_leased)
    states = np.zeros(pool.size, np.uint8)
    states[leased != 0] = BLANK
    states[(leased & view(pool.is_kept) != 0) & (counts == 0)] = CACHED
    held = counts > 0
    states[held] = np.minimum(counts[held] + HELD_BY_NONE, MOST)
    return states


def changed_runs(before: States, after: States) -> list[tuple[int, bytes]]:
    """Where `after` differs: the first block of each run, and the states from there on. `before` may be shorter; blocks
    that it lacks were not lent."""
    known = np.zeros_like(after)
    known[: len(before)] = before
    changed = np.flatnonzero(known != after)
    if not len(changed):
        return []
    parts = np.split(changed, np.flatnonzero(np.diff(changed) > GAP) + 1)
    return [(int(part[0]), after[part[0] : part[-1] + 1].tobytes()) for part in parts]
