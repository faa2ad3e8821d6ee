"""The scheduler: which sequences run, in which blocks, and what the next step computes.

There is no prefill phase and no decode phase. Every running sequence has `num_computed` positions that must catch up
with the tokens it has, or will have once results come: each plan advances it by as many as the budget allows, and
when it has caught up its last logits give one more token.

    submit(sequence)        it waits
    plan()                  grow: a block for each row whose next position has none
                            settle: preempt if the step after this one could run out of blocks, or one of higher
                                    priority waits
                            schedule: rows with one position to compute, then chunks of prompts
                            admit: in the queue's order, blocks for all known tokens or nothing
    ... the executor computes; the next plan may be made meanwhile ...
    apply(result)           append tokens, end what has ended, publish full blocks
"""

from scheduler_svc.core.admission import AdmissionQueue
from scheduler_svc.core.blocks import BlockPool, PoolMaker
from scheduler_svc.core.cache_events import CacheEvents
from scheduler_svc.core.lending import Lending
from scheduler_svc.core.masking import Masking
from scheduler_svc.core.plan import Lease, LeaseChange, Plan, Result
from scheduler_svc.core.planner import Planner
from scheduler_svc.core.results import Applied, Results
from scheduler_svc.core.room import Room, RoomMaker
from scheduler_svc.core.sequence import EndReason, Sequence, State
from scheduler_svc.core.state import NO_LEASE, CoreState


class NeverFits(Exception):
    """The sequence can never be computed, even under the largest lease."""


class Scheduler:
    """The core's face: bookkeeping for one executor. `state` is for reading. See `Room` for `watermark`; `longest`
    bounds a sequence's tokens, prompt included, where the model allows more. With several executors each has one, and
    their queues share the accounts of tenants; sequences that wait can be moved from one to another. `make_pool` and
    `make_room` are for comparison with other ways of handing memory out, while all else stays equal."""

    def __init__(
        self,
        *,
        prefix_caching: bool = True,
        watermark: float = 0.05,
        longest: int | None = None,
        queue: AdmissionQueue | None = None,
        cache_events: CacheEvents | None = None,
        make_pool: PoolMaker = BlockPool,
        make_room: RoomMaker = Room,
    ) -> None:
        queue = AdmissionQueue() if queue is None else queue
        self.state = CoreState(prefix_caching, longest, queue, cache_events or CacheEvents(), make_pool)
        self._lending = Lending(self.state)
        self._planner = Planner(self.state, self._lending, watermark, make_room)
        self._results = Results(self.state)
        self._masking = Masking(self.state)

    @property
    def is_attached(self) -> bool:
        return self.state.lease is not NO_LEASE

    def attach(self, lease: Lease) -> list[Sequence]:
        """Begin a session, with empty KV memory. Returns waiting sequences that can never fit it; they have ended."""
        state = self.state
        if self.is_attached:
            raise RuntimeError("attach() during a session: call detach() first")
        state.begin(lease)
        if state.hashed_block_size != lease.block_size:
            state.hashed_block_size = lease.block_size
            for sequence in state.queue:
                sequence.block_hashes.clear()
        hopeless = [sequence for sequence in state.queue if not state.bound(sequence)]
        hopeless += [sample for sequence in hopeless for sample in sequence.held if sample.state is State.HELD]
        hopeless += [answer for sequence in hopeless if sequence.group for answer in sequence.group.answers[1:]]
        for sequence in reversed(hopeless):  # held samples first: they are not to wait by themselves
            state.end(sequence)
        return hopeless

    def detach(self) -> list[Sequence]:
        """The executor is lost: what ran waits again, in the same order, to be computed anew. Returns what ran."""
        state, ran = self.state, self.running()
        for sequence in reversed(ran):
            state.preempt(sequence)
        for record in state.in_flight:
            for sequence in record.sequences:
                sequence.num_owed = 0
                if sequence.group is not None:
                    sequence.group.handle.num_owed = 0
        for sequence in state.queue:  # a result that cannot be may have been taken in by half, and is in flight no more
            sequence.num_owed = 0
        state.begin(NO_LEASE)
        return ran

    def running(self) -> list[Sequence]:
        """In order of admission; of a search the one that stands for all of its beams."""
        rows = self.state.sequences_in(self.state.columns.running_rows())
        return list(dict.fromkeys(sequence.group.handle if sequence.group else sequence for sequence in rows))

    def preempt(self, sequence: Sequence) -> None:
        """Let a running one wait again, at its place in the order."""
        self.state.counters.preemptions += 1
        self.state.preempt(sequence)

    def close(self) -> None:
        """Nothing is admitted any more in this session; what runs goes on."""
        self.state.is_closed = True

    def submit(self, sequence: Sequence) -> None:
        """Let the sequence wait for its turn, and those that it holds for theirs.

        Raises NeverFits; without a lease that shows at the next attach().
        """
        if self.is_attached and not self.state.bound(sequence):
            raise NeverFits
        sequence.state = State.WAITING
        self._own(sequence)
        self.state.queue.enter(sequence)
        for sample in sequence.held:
            sample.state = State.HELD
        self.state.num_held += len(sequence.held)

    def reach(self, sequence: Sequence) -> int:
        """Most tokens, prompt included, that the sequence may come to have here; 0 if it can never be computed."""
        return self.state.reach(sequence) if self.is_attached else 0

    def move(self, sequence: Sequence, other: "Scheduler") -> None:
        """A sequence that waits here, with those that it holds, waits in the other one from now on, at its place in the
        order. None of its tokens may be in flight. Raises NeverFits, and changes nothing, if it can never be computed
        there."""
        state, others = self.state, other.state
        if sequence.state is not State.WAITING or sequence.num_owed:
            raise RuntimeError(f"{sequence.request_id}: {sequence.state.value}, {sequence.num_owed} tokens in flight")
        if other.is_attached and not others.bound(sequence):
            raise NeverFits
        num_held = sum(sample.state is State.HELD for sample in sequence.held)
        state.queue.remove(sequence)
        state.num_held -= num_held
        if state.hashed_block_size != others.hashed_block_size:
            sequence.block_hashes.clear()
        other._own(sequence)
        others.num_held += num_held
        others.queue.push(sequence)

    def _own(self, sequence: Sequence) -> None:
        answers = [] if sequence.group is None else sequence.group.answers
        for member in (sequence, *sequence.held, *answers):
            member.scheduler = self

    def change_lease(self, change: LeaseChange) -> None:
        """Take in what is granted; what is to be returned goes with the next plan. Raises ValueError where something is
        granted that is leased already."""
        self._lending.change(change)

    def cancel(self, sequence: Sequence) -> None:
        """End the sequence now, wherever it is; its tokens in flight will be dropped. Harmless if it has ended."""
        self.state.end(sequence)

    def allow(self, sequence: Sequence, mask: bytes) -> None:
        """Let a masked sequence get its next token, one that `mask` allows (as in `StepPlan.masks`). Due before
        submit() and after each token; until then the sequence is not planned, and others are."""
        self._masking.allow(sequence, mask)

    def complete(self, sequence: Sequence) -> None:
        """End a masked sequence that may get no further token, instead of allow()."""
        if sequence.state is not State.ENDED:
            sequence.end_reason = EndReason.COMPLETE
            self.state.end(sequence)

    def flush_prefix_cache(self) -> int:
        """Nothing computed so far is found by later sequences. Returns how many blocks were forgotten."""
        return self.state.cache.clear()

    def plan(self, *, even_if_empty: bool = False) -> Plan | None:
        """The next step, or None if there is nothing to say. The caller keeps to `lease.plans_in_flight`."""
        return self._planner.plan(even_if_empty=even_if_empty)

    def apply(self, result: Result) -> Applied:
        """Take in the result of the oldest plan in flight. Raises ResultMismatch if it is another's."""
        return self._results.apply(result)


def scheduler_of(sequence: Sequence) -> Scheduler:
    """Whose the sequence is."""
    if sequence.scheduler is None:
        raise RuntimeError(f"{sequence.request_id}: a sequence that no scheduler was given")
    return sequence.scheduler
