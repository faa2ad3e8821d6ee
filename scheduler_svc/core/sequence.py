"""A sequence: the tokens of one answer in the making, and where they stand."""

import enum
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from scheduler_svc.core.beam_group import BeamGroup
    from scheduler_svc.core.scheduler import Scheduler

from scheduler_svc.core.block_hashes import BlockHashes
from scheduler_svc.core.token_rules import NO_RULES, TokenRules


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a sequence's tokens are drawn; meaning and ranges as in `SamplingParams` of inference.proto."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    index: int = 0
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    rules: TokenRules = NO_RULES


class State(enum.Enum):
    """Where a sequence is. Only the scheduler moves it."""

    NEW = "new"  # not submitted yet
    HELD = "held"  # joins the first sample of its request as soon as that one has computed the prompt
    WAITING = "waiting"  # in the admission queue, without row or blocks
    RUNNING = "running"  # has a row and blocks
    ENDED = "ended"


class Rank(NamedTuple):
    """A place in the order of admission, lower first; see `Accounts`. `number` counts requests, so no two
    sequences are equal."""

    place: float
    number: int
    sample: int


UNRANKED = Rank(0.0, 0, 0)
NEUTRAL = Sampling()


class EndReason(enum.Enum):
    """Why a sequence ended by itself."""

    END_TOKEN = "end_token"
    LENGTH = "length"
    NOT_FINITE = "not_finite"  # the model's logits held NaN or infinity
    COMPLETE = "complete"  # its grammar allows nothing more


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer in the making. Created by the engine, then changed by the scheduler alone.

    `token_ids` holds prompt and output; `num_prompt` tells where the output begins. The list may be others', too: it is
    copied when the sequence first enters a row. `logprobs` has one entry for each output token where asked for; where
    not it is no list, since each small object of thousands of sequences keeps some of what others leave. `held` are the
    other samples of the request while they are HELD. One that is a beam, or stands for all beams of a search, has its
    `group`.
    """

    request_id: str
    token_ids: list[int]
    max_tokens: int | None = None  # of output; None: as many as model and memory allow
    sampling: Sampling = NEUTRAL
    end_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    bypass_cache: bool = False  # neither finds cached prefixes nor is found as one
    priority: int = 0  # the higher goes first
    tenant: str = ""
    traceparent: str = ""  # whose children the spans of its steps are, where it is traced
    num_prompt: int = 0
    owner: Any = None  # whatever the engine wants to find again with the sequence
    scheduler: "Scheduler | None" = None  # whose it is; changed by `submit` and `move`

    state: State = State.NEW
    end_reason: EndReason | None = None
    row: int = -1
    rank: Rank = UNRANKED  # from `submit` on
    num_reserved: int = 0  # output tokens in its tenant's account until it ends
    max_total: int = 0  # most tokens, prompt included, under the largest lease
    num_owed: int = 0  # while it waits: tokens that were planned before it lost its row, and are not known yet
    masked: bool = False  # each token is drawn from those that a mask allows; see `Scheduler.allow`
    mask: bytes = b""
    mask_len: int = 0  # the mask is for the token after so many
    alone: bool = False  # computed in steps of its own, until the engine has seen it get a token
    stretched: bool = False  # its keys are those of a sequence longer than the lease's rope_switch_len
    num_cached: int | None = None  # prompt tokens found in the prefix cache at first admission
    held: Items["Sequence"] = ()
    group: "BeamGroup | None" = None
    score: float | None = None  # of an answer of a beam search
    # Lists where they are asked for; most sequences have none.
    logprobs: "list[TokenLogprobs] | tuple[()]" = ()
    prompt_logprobs: "list[TokenLogprobs] | tuple[()]" = ()  # of all prompt tokens but the first, so far
    block_hashes: BlockHashes = field(
        default_factory=BlockHashes
    )  # of the full blocks of token_ids, as far as computed

    def __post_init__(self) -> None:
        self.num_prompt = self.num_prompt or len(self.token_ids)
        if self.sampling.logprobs is not None:
            self.logprobs = []
        if self.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = []

    @property
    def num_sent(self) -> int:
        """Numbers that a plan names which starts it."""
        if self.group is not None:
            return self.group.num_tokens * self.group.num_to_start
        return len(self.token_ids) + self.sampling.rules.num_sent

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt are wanted that have not come."""
        return self.sampling.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt - 1

    @property
    def usable_prefix(self) -> int:
        """How many tokens need not be computed, if their K/V are at hand: none whose logits are needed, as the last
        one's are."""
        most = len(self.token_ids) - 1
        return min(most, len(self.prompt_logprobs)) if self.lacks_prompt_logprobs else most

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_rows(self) -> int:
        """That it, or its group, takes."""
        return 1 if self.group is None else self.group.parameters.width

    @property
    def num_known(self) -> int:
        """Tokens whose K/V it needs: its own, or the prompt and the outputs of all beams of its group."""
        if self.group is None:
            return len(self.token_ids)
        return self.num_prompt + self.group.search.num_tokens * self.num_rows

    @property
    def needs_mask(self) -> bool:
        """Whether its next token cannot be drawn yet."""
        return self.masked and self.mask_len != len(self.token_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one position: the drawn token's (rank 1 is the most likely) and the best ones."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


def writable(entries: list[TokenLogprobs] | tuple[()]) -> list[TokenLogprobs]:
    """Those of a sequence that asks for them. Raises TypeError where it does not."""
    if isinstance(entries, list):
        return entries
    raise TypeError("log-probabilities of a sequence that asks for none")
