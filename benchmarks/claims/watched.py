"""A scheduler that is looked at: what KV memory holds is noted with each plan."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from scheduler_svc.core.plan import NO_AMOUNTS, Lease, Plan
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.state import CoreState


class WatchedScheduler(Scheduler):
    """Works with the first `num_blocks` of a lease, all if None, which are handed out in an order of chance if
    `shuffled`. `watch(plan)` is called with each plan."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.num_blocks: int | None = None
        self.shuffled = False
        self.watch: Callable[[Plan], None] = lambda plan: None

    def attach(self, lease: Lease) -> list[Sequence]:
        if self.num_blocks is not None:
            lease = replace(lease, block_ids=lease.block_ids[: self.num_blocks], most_lent=NO_AMOUNTS)
        if self.shuffled:
            lease = replace(lease, block_ids=random.Random(0).sample(lease.block_ids, len(lease.block_ids)))
        return super().attach(lease)

    def plan(self, *, even_if_empty: bool = False) -> Plan | None:
        plan = super().plan(even_if_empty=even_if_empty)
        if plan is not None:
            self.watch(plan)
        return plan


class Occupancy:
    """What the slots of KV memory are for, added up over plans; no block may be in two tables.

    A slot holds a token from the plan on that computes it. Of those that a table names and that hold none, some will
    (`to_come`), and some never (`never`). `rounding`: taken with a table's blocks, not named by it; `free`: nobody's.
    """

    KINDS = ("tokens", "to_come", "never", "rounding", "free")

    def __init__(self) -> None:
        self.num_plans = self.num_running = 0
        self.slots = dict.fromkeys(self.KINDS, 0)

    def add(self, state: CoreState) -> None:
        columns, pool, block_size = state.columns, state.cache.pool, state.lease.block_size
        rows = columns.running_rows()
        in_tables = columns.num_blocks[rows] * block_size
        tokens = columns.num_computed[rows]
        wanted = (columns.max_total[rows] - 1).clip(max=in_tables)  # the last token of all needs no slot
        self.num_plans += 1
        self.num_running += len(rows)
        self.slots["tokens"] += int(tokens.sum())
        self.slots["to_come"] += int((wanted - tokens).sum())
        self.slots["never"] += int((in_tables - wanted).sum())
        self.slots["rounding"] += pool.num_used * block_size - int(in_tables.sum())
        self.slots["free"] += pool.num_free * block_size

    @property
    def running(self) -> float:
        """Sequences that run, on average."""
        return self.num_running / self.num_plans

    @property
    def shares(self) -> dict[str, float]:
        """Of all KV memory."""
        total = sum(self.slots.values())
        return {kind: slots / total for kind, slots in self.slots.items()}

    @property
    def utilisation(self) -> float:
        """The share of allocated KV memory that holds tokens."""
        return self.slots["tokens"] / (sum(self.slots.values()) - self.slots["free"])

    @property
    def mean_tokens(self) -> float:
        """That a running sequence holds, on average."""
        return self.slots["tokens"] / self.num_running
