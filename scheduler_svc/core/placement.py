"""Where a request goes among the executors of its model: where most of its prompt is cached, unless too many are there.

* The load of an executor is the share of its rows, or of its blocks if that is larger, that running sequences hold and
  waiting ones will take. Both are shares of the present lease, so an executor that lends more gets more.
* What is cached there of a prompt makes up for some load: a step's worth of tokens for STEP_WORTH, all of it together
  for MAX_WORTH at most. The request goes where its load, with the request in it, less that, is least.

So a hot prefix fills one executor up to that difference, is then computed on a second one, too, and from there on both
are filled alike. However much is cached, no executor gets a request while its load is MAX_WORTH above another's.
"""

from collections.abc import Sequence as Items

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, State

STEP_WORTH = 1 / 16
MAX_WORTH = 1 / 4
MAX_LOOKED_AT = 16  # of those that wait on one executor, for one that is better off on another


class Placement:
    """Chooses among schedulers that are attached to executors of one model. Changes none of them."""

    def __init__(self) -> None:
        self._num_chosen = 0

    def choose(self, sequence: Sequence, schedulers: Items[Scheduler]) -> Scheduler | None:
        """Where the sequence costs least; None if it can never be computed on any of them. Of those alone where it may
        become as long as on any: so what an answer without max_tokens comes to does not depend on where it went."""
        reaches = [scheduler.reach(sequence) for scheduler in schedulers]
        longest = max(reaches, default=0)
        if not longest:
            return None
        able = [scheduler for scheduler, reach in zip(schedulers, reaches, strict=True) if reach == longest]
        if len(able) == 1:
            return able[0]
        turn = self._num_chosen = (self._num_chosen + 1) % len(able)  # equals take turns
        return min(able[turn:] + able[:turn], key=lambda scheduler: cost(sequence, scheduler))

    def relief(self, schedulers: Items[Scheduler]) -> tuple[Sequence, Scheduler] | None:
        """A sequence that waits on one of them though it would start at once, and costs less, on another where nothing
        waits; and that one."""
        idle = min((s for s in schedulers if _has_room(s)), key=load, default=None)
        if idle is None:
            return None
        for busy in sorted((s for s in schedulers if len(s.state.queue)), key=load, reverse=True):
            for sequence in list(busy.state.queue)[:MAX_LOOKED_AT]:
                if _would_start(sequence, idle) and idle.reach(sequence) >= busy.reach(sequence):
                    # It is part of the busy one's load already.
                    if cost(sequence, idle) < load(busy) - _worth(_cached(sequence, busy), busy):
                        return sequence, idle
                    break  # those behind it cost as much
        return None


def load(scheduler: Scheduler, num_rows: int = 0, num_blocks: int = 0) -> float:
    """The share of its lease that is held or waited for, with so much more; above 1 where that is more than it has.
    While a suspect is computed alone, or is the next to be, all of it is held."""
    state = scheduler.state
    first = state.queue.first()
    held = 1.0 if state.running_alone or (first is not None and first.alone) else 0.0
    num_blocks += state.cache.pool.num_used + -(-state.queue.num_tokens // state.lease.block_size)
    num_rows += state.columns.num_leased - state.columns.num_free_rows + state.queue.num_rows
    return held + max(num_rows / max(state.columns.num_leased, 1), num_blocks / max(state.cache.pool.num_leased, 1))


def cost(sequence: Sequence, scheduler: Scheduler) -> float:
    """The load with the sequence in it, less what makes up for it."""
    num_cached = _cached(sequence, scheduler)
    num_blocks = -(-(sequence.num_known - num_cached) // scheduler.state.lease.block_size)
    return load(scheduler, sequence.num_rows + len(sequence.held), num_blocks) - _worth(num_cached, scheduler)


def _cached(sequence: Sequence, scheduler: Scheduler) -> int:
    """How many of its tokens need not be computed there."""
    state = scheduler.state
    state.stretch(sequence)
    return len(state.cached_prefix(sequence)) * state.lease.block_size


def _worth(num_cached: int, scheduler: Scheduler) -> float:
    return min(MAX_WORTH, STEP_WORTH * num_cached / max(scheduler.state.tokens_per_step, 1))


def _has_room(scheduler: Scheduler) -> bool:
    state = scheduler.state
    return not len(state.queue) and state.columns.num_free_rows > 0 and not state.running_alone


def _would_start(sequence: Sequence, idle: Scheduler) -> bool:
    """Whether it may be moved, and finds rows and blocks there."""
    if sequence.state is not State.WAITING or sequence.num_owed or sequence.alone:
        return False
    state = idle.state
    num_blocks = -(-sequence.num_known // state.lease.block_size)
    return sequence.num_rows <= state.columns.num_free_rows and num_blocks < state.cache.pool.num_free
