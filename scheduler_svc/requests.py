"""What the API hands to the engine, and what it gets back."""

import math
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from scheduler_svc.core.beam import EarlyStopping
from scheduler_svc.core.sequence import Sampling, TokenLogprobs
from scheduler_svc.text.grammars import Grammar
from scheduler_svc.trace import Trace


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request whose fields have been validated and whose prompt has been tokenized.

    `num_samples` answers are wanted; of a beam search if there is `beam`, or the likeliest of `best_of` samples.
    `max_tokens` None means as many as fit. `sampling.seed` is drawn by the API where the client gave none.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    max_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_string: bool = False
    cache_salt: str = ""
    bypass_cache: bool = False
    priority: int = 0
    tenant: str = ""
    num_samples: int = 1
    echo: bool = False
    grammar: Grammar | None = None
    beam: "BeamOptions | None" = None
    best_of: int | None = None
    model: str = ""  # served name; empty means the only one
    expires_at: float = math.inf  # of the event loop's clock, in seconds
    streams: bool = True  # else nothing of an answer is wanted before its end
    trace: Trace | None = None  # where it is traced


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """As in `BeamSearch` of inference.proto."""

    width: int
    length_penalty: float
    early_stopping: EarlyStopping


@dataclass(frozen=True, slots=True)
class Finish:
    """How an answer ended. One of the three is set, unless it ended by length."""

    token_id: int | None = None
    stop_string: str | None = None
    complete: bool = False  # its grammar allows nothing more

    @property
    def by_length(self) -> bool:
        return self.token_id is None and self.stop_string is None and not self.complete


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


PlainDelta = tuple[str, list[int]]  # a Delta that has nothing but text and tokens, of an answer that is alone


@dataclass(slots=True)  # not frozen, and no lists made for what is rarely there: either would double what one costs
class Delta:
    """All that has become known of the answer `index` since its last one. `finish` and `usage` are set in the last, and
    so is the `score` of one that was chosen among others."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: Items[TokenLogprobs] = ()
    finish: Finish | None = None
    usage: Usage | None = None
    index: int = 0
    prompt_token_ids: Items[int] = ()
    prompt_logprobs: Items[TokenLogprobs] = ()
    score: float | None = None
