"""Takes results in: tokens to their sequences, whoever holds the rows by now."""

from dataclasses import dataclass

import numpy as np

from scheduler_svc.core import prompt_scores
from scheduler_svc.core.beams import Beams
from scheduler_svc.core.plan import LogprobColumn, Result
from scheduler_svc.core.sequence import EndReason, Sequence, State, TokenLogprobs, writable
from scheduler_svc.core.state import CoreState, InFlight
from scheduler_svc.core.token_ids import TOKEN_IDS


@dataclass(frozen=True, slots=True)
class Applied:
    """What a result has changed: sequences that got a token, and sequences that have ended by it."""

    updated: list[Sequence]
    ended: list[Sequence]


class ResultMismatch(Exception):
    """A result that cannot be that of the oldest plan in flight."""


class Results:
    """Changes the state by what the executor says."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._beams = Beams(state)

    def apply(self, result: Result) -> Applied:
        """Take in the result of the oldest plan in flight. Raises ResultMismatch if it is another's."""
        record = self._state.in_flight[0] if self._state.in_flight else None
        if record is None or record.step != result.step or len(record.rows) != len(result.tokens):
            raise ResultMismatch(f"step {result.step} with {len(result.tokens)} tokens is not the plan in flight")
        if result.tokens.max(initial=-1) >= self._state.lease.vocab_size:
            raise ResultMismatch(f"step {result.step}: id {result.tokens.max()} is outside of the vocabulary")
        if len(result.prompt_logprobs) != len(record.scored):
            raise ResultMismatch(f"step {result.step} tells of {len(result.prompt_logprobs)} prompts, not its plan's")
        self._state.in_flight.popleft()
        failed = self._take_prompt_logprobs(record, result) if record.scored else []
        applied = self._take_tokens(record, result)
        applied.ended.extend(failed)
        return applied

    def _take_tokens(self, record: InFlight, result: Result) -> Applied:
        current = self._state.columns.tenancy[record.rows] == record.tenancies
        regular = current & (result.tokens >= 0)
        if self._state.groups:
            regular &= np.array([sequence.group is None for sequence in record.sequences], np.bool_)
        if regular.all():
            return self._append(record, result.tokens, result.logprobs)
        chosen = np.flatnonzero(regular).tolist()
        logprobs = result.logprobs and [result.logprobs[i] for i in chosen]
        applied = self._append(record.only(chosen), result.tokens[chosen], logprobs)
        for i in np.flatnonzero(~regular).tolist():
            entry = result.logprobs[i] if result.logprobs else None
            if record.sequences[i].group is not None:
                self._take_beam(record.sequences[i], int(result.tokens[i]), entry, bool(current[i]), applied)
            else:
                self._append_irregular(record.sequences[i], int(result.tokens[i]), entry, applied)
        return applied

    def _take_prompt_logprobs(self, record: InFlight, result: Result) -> list[Sequence]:
        """Returns those that have ended because logits were not finite."""
        failed = []
        for scored, entries in zip(record.scored, result.prompt_logprobs, strict=True):
            if not prompt_scores.take(scored, entries):
                self._fail(scored.sequence)
                failed.append(scored.sequence)
        return failed

    def _fail(self, sequence: Sequence) -> None:
        """The model's logits were not finite: the sequence ends, and nobody else may use its blocks."""
        self._state.cache.withdraw(sequence.block_hashes)
        self._state.counters.not_finite += 1
        sequence.end_reason = EndReason.NOT_FINITE
        self._state.end(sequence)

    def _append(self, record: InFlight, tokens: np.ndarray, logprobs: LogprobColumn) -> Applied:
        """One more token for each of these running rows."""
        rows, sequences = record.rows, record.sequences
        columns = self._state.columns
        num_tokens = columns.num_tokens[rows] + 1
        columns.num_tokens[rows] = num_tokens
        columns.in_flight[rows] -= 1
        for token_ids, token in zip(record.token_lists, TOKEN_IDS.of(tokens), strict=True):
            token_ids.append(token)
        if logprobs is not None:
            for sequence, entry in zip(sequences, logprobs, strict=True):
                if entry is not None:
                    writable(sequence.logprobs).append(entry)
        self._state.counters.generated_tokens += len(rows)
        self._publish_outputs(rows, sequences)
        at_end = (columns.end_ids[rows] == tokens[:, None]).any(axis=1)
        leaving = np.flatnonzero(at_end | (num_tokens >= columns.max_total[rows])).tolist()
        ended = [sequences[i] for i in leaving if at_end[i] or len(sequences[i].token_ids) >= sequences[i].max_total]
        for sequence in ended:
            self._finish(sequence)
        for sequence in [sequences[i] for i in reversed(leaving) if sequences[i].state is State.RUNNING]:
            self._state.preempt(sequence)  # with one token more all its keys are others: it starts anew
        return Applied(list(sequences), ended)

    def _append_irregular(
        self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None, applied: Applied
    ) -> None:
        """A token of a sequence that has lost its row meanwhile (kept if it was preempted, dropped if it has ended), or
        one that is none because the logits were not finite."""
        if sequence.state is State.ENDED:
            if token < 0:
                self._state.cache.withdraw(sequence.block_hashes)
            return
        if token < 0:
            self._fail(sequence)
            applied.ended.append(sequence)
            return
        sequence.num_owed -= 1
        sequence.token_ids.append(token)
        if logprobs is not None:
            writable(sequence.logprobs).append(logprobs)
        self._state.counters.generated_tokens += 1
        applied.updated.append(sequence)
        if token in sequence.end_token_ids or len(sequence.token_ids) >= sequence.max_total:
            self._finish(sequence)
            applied.ended.append(sequence)

    def _take_beam(
        self, beam: Sequence, token: int, candidates: TokenLogprobs | None, is_current: bool, applied: Applied
    ) -> None:
        group = beam.group
        if group is None:
            raise RuntimeError("a beam without a group")
        num_tokens = group.search.num_tokens
        applied.ended.extend(self._beams.take(beam, token, candidates, is_current))
        if group.search.num_tokens > num_tokens:  # what single beams have drawn would be lost with the executor
            applied.updated.append(group.handle)

    def _publish_outputs(self, rows: np.ndarray, sequences: list[Sequence]) -> None:
        """Publish, for each of these rows, the next block if its ids are known and its K/V is final."""
        if not self._state.prefix_caching:
            return
        columns, block_size = self._state.columns, self._state.lease.block_size
        published = columns.num_published[rows]
        full = np.minimum(columns.num_tokens[rows], columns.num_computed[rows]) // block_size > published
        if not full.any():
            return
        indices = published[full]
        blocks = columns.block_table[rows[full], indices]
        columns.num_published[rows[full]] = indices + 1
        chosen = np.flatnonzero(full).tolist()
        for i, index, block in zip(chosen, indices.tolist(), blocks.tolist(), strict=True):
            self._state.extend_hashes(sequences[i])
            self._state.publish_block(sequences[i], index, block)

    def _finish(self, sequence: Sequence) -> None:
        """The sequence has got its last token."""
        at_end = sequence.token_ids[-1] in sequence.end_token_ids
        sequence.end_reason = EndReason.END_TOKEN if at_end else EndReason.LENGTH
        self._state.end(sequence)
