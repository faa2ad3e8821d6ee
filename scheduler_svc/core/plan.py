"""What the core says: one step's work as changes to the executor's rows. Mirrors `StepPlan` of executor.proto."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.sequence import Sampling, TokenLogprobs

Int32s = NDArray[np.int32]
# An entry for each sampling row in the plan's order, None where not asked for; or nothing at all.
LogprobColumn = list[TokenLogprobs | None] | None
# Ids and rules that a plan names for rows that start, and as many for those that join, where they are more than one: a
# cached prefix, or a sample, costs nothing but bytes.
MAX_SENT = 1 << 18


class Amounts(NamedTuple):
    """How much of each thing that an executor lends; `tokens` are those of a step."""

    blocks: int
    rows: int
    tokens: int


NO_AMOUNTS = Amounts(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Lease:
    """What the executor has lent for one session, at its begin; `LeaseChange` and plans change it. No more rows than
    tokens per step."""

    block_ids: Items[int]
    row_ids: list[int]
    tokens_per_step: int
    block_size: int
    plans_in_flight: int = 2
    max_model_len: int = 1 << 31
    vocab_size: int = 1 << 31
    # Not 0: in a sequence that starts in its row with more known tokens than this the model turns keys otherwise.
    rope_switch_len: int = 0
    # Of a session that has the executor to itself; at least what is lent here.
    most_lent: Amounts = NO_AMOUNTS
    most: Amounts = field(init=False)  # the largest lease there is

    def __post_init__(self) -> None:
        own = len(self.block_ids), len(self.row_ids), self.tokens_per_step
        object.__setattr__(self, "most", Amounts(*map(max, self.most_lent, own)))


@dataclass(frozen=True, slots=True)
class LeaseChange:
    """The lease grows by what is granted. What it has then beyond `keep` is to be returned."""

    granted_blocks: list[int] = field(default_factory=list)
    granted_rows: list[int] = field(default_factory=list)
    granted_tokens: int = 0
    keep: Amounts | None = None


@dataclass(frozen=True, slots=True)
class Returned:
    """What the lease has no more once the plan that says so is issued."""

    blocks: list[int]
    rows: list[int]
    tokens: int


NOTHING_RETURNED = Returned([], [], 0)


@dataclass(frozen=True, slots=True)
class Demand:
    """What the sequences could use, and the least that the first of them, number `claim`, cannot go on without."""

    wants: Amounts
    least_blocks: int
    least_rows: int
    claim: int


@dataclass(frozen=True, slots=True)
class StartedRow:
    """A sequence that begins, or begins again, in a row; its first `num_computed` positions are in `blocks` already."""

    row: int
    token_ids: list[int]
    num_prompt: int
    num_computed: int
    blocks: list[int]
    sampling: Sampling
    end_token_ids: tuple[int, ...]
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class JoinedRow:
    """A sequence that begins in a row with the tokens and blocks of another one, which computes its last token in this
    plan: both draw from the same logits."""

    row: int
    like: int
    sampling: Sampling
    end_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForkedRow:
    """A beam that goes on in a row as another one, or the same, would: with what `parent` has before the plan, but for
    `token` in place of the last one that it has sampled. `is_fresh`: the row was free before."""

    row: int
    parent: int
    token: int
    sampling: Sampling
    is_fresh: bool


@dataclass(frozen=True, slots=True)
class Copies:
    """Copy-on-write: in the table of `rows[i]` block `sources[i]` is replaced by `destinations[i]`, its copy."""

    rows: list[int]
    sources: list[int]
    destinations: list[int]


@dataclass(frozen=True, slots=True)
class Masks:
    """Which ids the token of each of these rows may be: `masks[i]` as in `StepPlan.masks`."""

    rows: list[int]
    masks: list[bytes]


NO_MASKS = Masks([], [])


@dataclass(frozen=True, slots=True)
class Plan:
    """Applied in the order of the fields. `rows`, `num_tokens` and `samples` are the schedule, one entry a row; one of
    0 tokens is a joined row right behind the row that it is like, or behind others that are."""

    step: int
    forks: list[ForkedRow]  # all at once
    ended: list[int]
    started: list[StartedRow]
    joined: list[JoinedRow]
    appended_rows: Int32s
    appended_blocks: Int32s
    copies: Copies
    rows: Int32s
    num_tokens: Int32s
    samples: NDArray[np.bool_]
    masks: Masks = NO_MASKS
    returned: Returned = NOTHING_RETURNED
    demand: Demand | None = None  # None: as told before
    exclusive: bool = False  # in a step of which nobody else has a part


@dataclass(frozen=True, slots=True)
class Result:
    """What the executor says of one plan: a token for each sampling row in the plan's order, -1 where the logits were
    not finite."""

    step: int
    tokens: Int32s
    logprobs: LogprobColumn = None
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)  # as the plan's record says: `scored`
