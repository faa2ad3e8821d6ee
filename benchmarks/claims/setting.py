"""What all sections have in common: how much memory, which requests, how long they may take."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.claims.paper import paper_lease
from benchmarks.claims.requests import Backlog, Mix, Source
from scheduler_svc.core.plan import Lease

BLOCK_SIZE = 16
LONGEST = 2048  # tokens of a sequence, which is the slab of the policy "maximum"
KV_TOKENS = 8192  # four such slabs
MAX_ROWS, TOKENS_PER_STEP = 256, 1024
BACKLOG = 8  # sequences that wait at saturation

Say = Callable[[str], None]
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """`window_s` is how long a rate is measured, `num_plans` over how many each share on paper is counted."""

    mixes: tuple[Mix, ...]
    vocab_size: int
    longest: int
    kv_tokens: int
    window_s: float
    num_plans: int
    quick: bool
    say: Say

    @property
    def num_blocks(self) -> int:
        return self.kv_tokens // BLOCK_SIZE

    def lease(self, num_blocks: int | None = None, block_size: int = BLOCK_SIZE) -> Lease:
        """On paper, what the executor lends."""
        count = num_blocks or self.kv_tokens // block_size
        return paper_lease(count, MAX_ROWS, TOKENS_PER_STEP, block_size, self.vocab_size)

    def source(self, mix: Mix, seed: int = 0) -> Source:
        return Source(mix, self.vocab_size, seed)

    def backlog(self, mix: Mix) -> Backlog:
        return Backlog(self.source(mix), BACKLOG)
