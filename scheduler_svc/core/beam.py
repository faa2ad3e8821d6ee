"""Beam search over candidates: which continuations go on, which have ended, and when to stop.

The meaning is that of Hugging Face's generate() without sampling: a beam's total is the sum of its log-probabilities;
an answer's score is its total divided by (its number of tokens, end token included) ** length_penalty. At each step
the best `width` continuations that do not end go on, and those that end are answers if they are among the best `width`
of all continuations. The best `width` answers are kept.

Of each beam the `width` best tokens and as many more as there are end tokens are enough: no other can be chosen.
"""

import enum
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler_svc.core.sequence import TokenLogprobs


class EarlyStopping(enum.Enum):
    """When to stop, once there are `width` answers."""

    NO = "no"  # as soon as the best beam, at its present length, does not beat the worst of them
    YES = "yes"  # at once
    NEVER = "never"  # as soon as the best beam cannot come to beat the worst of them


@dataclass(frozen=True, slots=True)
class BeamParameters:
    """Meaning and ranges as in `BeamSearch` of inference.proto. End tokens do not count before `min_tokens`.

    With each token of an answer, the `num_told` likeliest ones at its place are told.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.NO
    end_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    num_told: int = 0

    @property
    def num_candidates(self) -> int:
        """How many of its most likely tokens to know of each beam."""
        return max(self.width + len(self.end_token_ids), self.num_told)


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A token of a beam; the one before it, and so on, are the beam's output."""

    token: int
    logprobs: TokenLogprobs
    before: "Node | None"


@dataclass(frozen=True, slots=True)
class Beam:
    """`total` is the sum of the log-probabilities of all tokens up to `last`; None before the first one."""

    total: float
    last: Node | None


@dataclass(frozen=True, slots=True)
class BeamAnswer:
    score: float
    last: Node


@dataclass(slots=True)
class BeamSearch:
    """`beams` go on, best first; `answers` have ended, best first. `num_tokens` of output are known of each beam."""

    parameters: BeamParameters
    beams: list[Beam] = field(default_factory=lambda: [Beam(0.0, None)])
    answers: list[BeamAnswer] = field(default_factory=list)
    num_tokens: int = 0

    def advance(self, candidates: list[TokenLogprobs], max_tokens: int) -> list[int]:
        """One more token for each beam, out of the best ones that could follow it. `max_tokens` is the longest output.

        Returns the index of the beam before that each beam now goes on from; nothing once the search is over.
        """
        width = self.parameters.width
        continuations = self._best_first(candidates)
        self.num_tokens += 1
        is_last = self.num_tokens >= max_tokens
        going_on: list[Beam] = []
        parents: list[int] = []
        for place, (total, index, rank) in enumerate(continuations):
            if place >= width and (is_last or len(going_on) == width):
                break
            found = candidates[index]
            ends = is_last or found.top_ids[rank] in self.parameters.end_token_ids
            if ends and place >= width:
                continue
            node = Node(found.top_ids[rank], self._told(found, rank), self.beams[index].last)
            if ends:
                self.answers.append(BeamAnswer(self._score(total, self.num_tokens), node))
            elif len(going_on) < width:
                going_on.append(Beam(total, node))
                parents.append(index)
        self.answers = sorted(self.answers, key=lambda answer: -answer.score)[:width]
        self.beams = going_on
        return [] if self._is_over(max_tokens) else parents

    def last_token(self, index: int) -> int:
        """Of a beam that goes on. Raises ValueError before the first one."""
        last = self.beams[index].last
        if last is None:
            raise ValueError(f"beam {index} has no token yet")
        return last.token

    def _told(self, found: TokenLogprobs, rank: int) -> TokenLogprobs:
        """What is remembered of a token: no more than the answer needs, for outputs may be long and beams many."""
        most = self.parameters.num_told
        return TokenLogprobs(found.top_logprobs[rank], rank + 1, found.top_ids[:most], found.top_logprobs[:most])

    def _best_first(self, candidates: list[TokenLogprobs]) -> Iterator[tuple[float, int, int]]:
        """Totals of all continuations, with the index of their beam and the place of their token among its candidates.

        Of equal ones the better beam's, then the likelier token. Few of many are looked at: all of 128 beams with as
        many candidates each would hold up everybody's tokens.
        """
        held_back = self.parameters.end_token_ids if self.num_tokens < self.parameters.min_tokens else ()
        of_beams = (
            _continuations(index, beam.total, found, held_back)
            for index, (beam, found) in enumerate(zip(self.beams, candidates, strict=True))
        )
        return heapq.merge(*of_beams, key=lambda entry: -entry[0])

    def _score(self, total: float, num_tokens: int) -> float:
        return total / num_tokens**self.parameters.length_penalty

    def _is_over(self, max_tokens: int) -> bool:
        if not self.beams:
            return True
        if len(self.answers) < self.parameters.width:
            return False
        if self.parameters.early_stopping is EarlyStopping.YES:
            return True
        hopes_to_grow = self.parameters.early_stopping is EarlyStopping.NEVER and self.parameters.length_penalty > 0
        most = self._score(self.beams[0].total, max_tokens if hopes_to_grow else self.num_tokens)
        return most <= self.answers[-1].score


def _continuations(
    index: int, total: float, found: TokenLogprobs, held_back: tuple[int, ...]
) -> Iterator[tuple[float, int, int]]:
    for rank, logprob in enumerate(found.top_logprobs):
        if found.top_ids[rank] not in held_back:
            yield total + logprob, index, rank


def outputs_of(last: Node | None) -> list[Node]:
    """The nodes of a beam, first token first."""
    nodes = []
    while last is not None:
        nodes.append(last)
        last = last.before
    nodes.reverse()
    return nodes
