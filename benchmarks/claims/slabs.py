"""The baseline: KV memory as engines without block tables hand it out, a slab for each sequence for all of its life.

A slab is a run of consecutive blocks, taken when the sequence is admitted and given back when it ends; its block table
names all of them from the beginning. So scheduler, executor, kernels and model are the same for every policy, and what
differs is what memory a sequence holds. How large a slab is:

* maximum: what the longest sequence could take,
* power of two: the prompt, and the smallest power of two that holds the output,
* oracle: the prompt and the output, as if its length were known beforehand.

Slabs are rounded up to whole blocks, so up to 15 slots more; and do without the watermark that a growing table needs.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from benchmarks.claims.runs import Buddy, FirstFit, Runs
from benchmarks.claims.watched import WatchedScheduler
from scheduler_svc.core import sequence as core
from scheduler_svc.core.blocks import BlockPool, OutOfBlocks
from scheduler_svc.core.masking import Masking
from scheduler_svc.core.room import Need, Room
from scheduler_svc.core.sharing import Sharing
from scheduler_svc.core.state import CoreState

# Slots of a sequence's slab; the second argument is the longest that a sequence may be.
SlabSize = Callable[[core.Sequence, int], int]


def maximum(sequence: core.Sequence, longest: int) -> int:
    return longest


def power_of_two(sequence: core.Sequence, longest: int) -> int:
    num_output = sequence.max_total - sequence.num_prompt
    return min(sequence.num_prompt + (1 << (num_output - 1).bit_length()), longest)


def oracle(sequence: core.Sequence, longest: int) -> int:
    return sequence.max_total


class SlabPool(BlockPool):
    """The leased blocks as slabs. One table holds a slab, and nobody else."""

    def __init__(
        self, block_ids: Sequence[int], on_evict: Callable[[int], None], make_runs: Callable[[int], Runs]
    ) -> None:
        super().__init__(block_ids, on_evict)
        self._first = block_ids[0] if len(block_ids) else 0
        if list(block_ids) != list(range(self._first, self._first + len(block_ids))):
            raise ValueError("slabs need a lease of consecutive blocks: let one scheduler have the executor to itself")
        self._runs = make_runs(len(block_ids))

    @property
    def num_blank(self) -> int:
        return self._runs.num_free

    @property
    def num_free(self) -> int:
        """Wherever they lie: `has_room` says whether they are of any use."""
        return self._runs.num_free

    def has_room(self, count: int) -> bool:
        return self._runs.has_room(count)

    def allocate(self, count: int) -> list[int]:
        if not count:
            return []
        if not self._runs.has_room(count):
            raise OutOfBlocks(f"no {count} blocks in one piece, {self.num_free} free")
        first = self._first + self._runs.take(count)
        slab = list(range(first, first + count))
        for block in slab:
            self.ref_count[block] = 1
        return slab

    def share(self, blocks: Iterable[int]) -> None:
        if list(blocks):
            raise ValueError("slabs are not shared: switch the prefix cache off, and ask for one sample")

    def release(self, table: Sequence[int]) -> None:
        before = self._runs.num_free
        self._runs.give_back(table[0] - self._first)
        for block in table:
            self.ref_count[block] = 0
        self.num_freed += self._runs.num_free - before  # with what rounding had taken


class SlabRoom(Room):
    """A sequence starts where there is a slab for it. None grows, so nothing is kept free."""

    def __init__(
        self,
        state: CoreState,
        sharing: Sharing,
        masking: Masking,
        watermark: float,
        size: SlabSize,
        longest: int,
    ) -> None:
        super().__init__(state, sharing, masking, watermark)
        self._size, self._longest = size, longest

    @property
    def spared(self) -> int:
        return 0

    def blocks_to_start(self, sequence: core.Sequence) -> int:
        return -(-self._size(sequence, self._longest) // self._state.lease.block_size)

    def for_sequence(self, sequence: core.Sequence) -> Need | None:
        need, pool = super().for_sequence(sequence), self._state.cache.pool
        if need is None or not isinstance(pool, SlabPool) or not pool.has_room(need.num_blocks):
            return None
        return need


def slab_scheduler(size: SlabSize, longest: int, make_runs: Callable[[int], Runs] = Buddy) -> WatchedScheduler:
    """A scheduler that hands out slabs to sequences of at most `longest` tokens."""
    return WatchedScheduler(
        prefix_caching=False,
        longest=longest,
        make_pool=partial(SlabPool, make_runs=make_runs),
        make_room=partial(SlabRoom, size=size, longest=longest),
    )


def paged_scheduler(longest: int) -> WatchedScheduler:
    """As it serves: with a prefix cache, in which a preempted sequence finds what is left of its own blocks."""
    return WatchedScheduler(longest=longest)


# From the longest that a sequence may be.
PolicyMaker = Callable[[int], WatchedScheduler]
POLICIES: dict[str, PolicyMaker] = {
    "paged": paged_scheduler,
    "slab_max": partial(slab_scheduler, maximum),
    "slab_pow2": partial(slab_scheduler, power_of_two),
    "slab_oracle": partial(slab_scheduler, oracle),
}
# The best that contiguous memory could do: lengths known beforehand, and slabs that are not rounded to powers of two.
BEST_SLABS: PolicyMaker = partial(slab_scheduler, oracle, make_runs=FirstFit)
