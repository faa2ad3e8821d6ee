"""What changes the logits of the rows that ask for it, as tables on the device with a place a row: token counts for
penalties, what is added whatever was drawn, and sequences that must not be completed."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from executor_svc.model.added_logits import AddedLogits
from executor_svc.model.banned_sequences import BannedSequences
from executor_svc.model.drawing import MAX_ELEMENTS
from executor_svc.model.penalties import Penalties, TokenCounts
from executor_svc.model.sampling_plan import SamplingPlan
from executor_svc.model.sampling_rows import NO_PLACE, TablePlaces
from executor_svc.step import Int32s
from executor_svc.token_rules import NO_RULES, TokenRules, read_rules
from paged.v1 import executor_pb2


@dataclass(frozen=True, slots=True)
class Past:
    """What is remembered of a row's tokens, to be given to a fork; None for what it has no use for."""

    counts: TokenCounts | None
    recent: torch.Tensor | None


class ForkWithoutPast(ValueError):
    """A child asks for penalties, or bans sequences of several tokens, and its parent, which does not, has not kept
    what that takes of its tokens."""

    def __init__(self, parent: int, child: int, what: str) -> None:
        super().__init__(
            f"fork_sampling: row {child} has {what} and its parent, row {parent}, has none; "
            "give both one, or start the child as a row of its own"
        )


class RowTables:
    """Places are given to rows at their start or fork, and taken back at their end."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._penalties = Penalties(vocab_size, device)
        self._added = AddedLogits(vocab_size, device)
        self._banned = BannedSequences(device)

    def start(self, sampling: executor_pb2.RowSampling, token_ids: Int32s, num_prompt: int) -> TablePlaces:
        counts = self._penalties.start(token_ids, num_prompt) if Penalties.wanted(sampling) else NO_PLACE
        rules = read_rules(sampling)
        if rules is NO_RULES:
            return TablePlaces(counts)
        banned = self._banned.start(_several(rules), token_ids) if rules.look_back else NO_PLACE
        return TablePlaces(counts, self._start_added(rules), banned)

    def past(self, places: TablePlaces) -> Past:
        recent = None if places.banned == NO_PLACE else self._banned.snapshot(places.banned)
        return Past(self._penalties.snapshot(places.counts), recent)

    def fork(self, sampling: executor_pb2.RowSampling, past: Past, parent: int, child: int) -> TablePlaces:
        """The child's own places, as if it had drawn its parent's tokens. Raises ForkWithoutPast."""
        rules = read_rules(sampling)
        if Penalties.wanted(sampling) and past.counts is None:
            raise ForkWithoutPast(parent, child, "a penalty")
        if rules.look_back and past.recent is None:
            raise ForkWithoutPast(parent, child, "a banned sequence of several tokens")
        counts = self._penalties.restore(past.counts) if Penalties.wanted(sampling) and past.counts else NO_PLACE
        if rules is NO_RULES:
            return TablePlaces(counts)
        banned = NO_PLACE
        if rules.look_back and past.recent is not None:
            banned = self._banned.fork(_several(rules), past.recent)
        return TablePlaces(counts, self._start_added(rules), banned)

    def end(self, places: TablePlaces) -> None:
        self._penalties.end(places.counts)
        if places.added != NO_PLACE:
            self._added.end(places.added)
        if places.banned != NO_PLACE:
            self._banned.end(places.banned)

    def clear(self) -> None:
        self._penalties.clear()
        self._added.clear()
        self._banned.clear()

    def apply(self, logits: torch.Tensor, plan: SamplingPlan, columns: Mapping[str, torch.Tensor]) -> None:
        """Change contiguous float32 logits `[num_rows, vocab]` in place, as the rows want it."""
        if len(plan.ruled):
            self._added.apply(logits, columns["sample_ruled"], columns["sample_added"])
        step = max(1, MAX_ELEMENTS // logits.shape[1])  # it takes several times what the logits do
        for begin in range(0, len(plan.penalised), step):
            part = slice(begin, begin + step)
            places = columns["sample_penalised"][part]
            punished = self._penalties.apply(
                logits.index_select(0, places),
                columns["sample_counts"][part],
                repetition=columns["sample_repetition"][part] if plan.repeats else None,
                frequency=columns["sample_frequency"][part],
                presence=columns["sample_presence"][part],
            )
            logits.index_copy_(0, places, punished)
        if len(plan.watched):
            self._banned.apply(logits, columns["sample_watched"], columns["sample_banned"])

    def add(self, drawn: torch.Tensor, plan: SamplingPlan, columns: Mapping[str, torch.Tensor]) -> None:
        """Remember drawn tokens, int64 `[num_rows]`, -1 for none, of the rows that want it."""
        if len(plan.penalised):
            self._penalties.add(columns["sample_counts"], drawn.index_select(0, columns["sample_penalised"]))
        if len(plan.watched):
            self._banned.add(columns["sample_banned"], drawn.index_select(0, columns["sample_watched"]))

    def _start_added(self, rules: TokenRules) -> int:
        adds = len(rules.bias_ids) or len(rules.allowed_ids) or any(len(sequence) == 1 for sequence in rules.banned)
        return self._added.start(rules) if adds else NO_PLACE


def _several(rules: TokenRules) -> list[Int32s]:
    return [sequence for sequence in rules.banned if len(sequence) > 1]
