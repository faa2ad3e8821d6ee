"""The simulated runner: exact, without a model, behind the same `Runner` as the real one.

It keeps a token id in every slot where the real one keeps K/V, and reads a row's context back through its block
table. So a block that is stale, foreign, or copied wrongly changes what the row says, or raises.
"""

import os
import time
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from executor_svc.simulated.launched import LaunchedStep
from executor_svc.simulated.memory import SlotMemory, UnwrittenSlot
from executor_svc.simulated.script import Script, ScriptedFault
from executor_svc.simulated.text import UInt64s, choose, draw_keys, mix, pass_over, score, token_logprobs, tokens_of
from executor_svc.step import Int32s, Logprobs, Masks, RowStart, Scored, Step, StepOutput
from executor_svc.token_rules import MAX_BANNED_TOKENS, NO_RULES, TokenRules, read_rules
from paged.v1 import executor_pb2

_NO_TOKEN = -1


class SimulatedFailure(Exception):
    """The plans led the runner to what a real one would answer with garbage; or the script wants a failure."""


@dataclass(frozen=True, slots=True)
class Latency:
    """How long a step takes: fixed, for each computed token, and for each token that a row's last query sees."""

    fixed_us: float = 0.0
    per_token_us: float = 0.0
    per_context_token_ns: float = 0.0

    @property
    def takes_time(self) -> bool:
        return bool(self.fixed_us or self.per_token_us or self.per_context_token_ns)

    def step_s(self, step: Step) -> float:
        context = int(step.context_lens.sum(dtype=np.int64))
        tokens_us = self.per_token_us * len(step.token_ids) + self.per_context_token_ns * context / 1e3
        return (self.fixed_us + tokens_us) / 1e6


@dataclass(slots=True)
class _Sampled:
    """Columns over the sampling rows of a step."""

    rows: Int32s
    hashes: UInt64s
    tokens: Int32s


class _RowColumns:
    """What the runner keeps for each row."""

    def __init__(self, num_rows: int) -> None:
        self.last_token = np.full(num_rows, _NO_TOKEN, np.int32)
        self.num_prompt = np.zeros(num_rows, np.int32)
        self.min_tokens = np.zeros(num_rows, np.int64)
        self.draws = np.zeros(num_rows, np.bool_)  # temperature above 0
        self.draw_key = np.zeros(num_rows, np.uint64)
        self.special = np.zeros(num_rows, np.bool_)  # a script's prompt: replies or faults
        self.num_logprobs = np.full(num_rows, -1, np.int32)
        self.rules: dict[int, TokenRules] = {}  # of rows that have any
        self.any_draw = self.any_hold = self.any_logprobs = False  # so that plain batches pay for none of it
        self.end_token_ids: list[frozenset[int]] = [frozenset()] * num_rows
        self.prompt: list[tuple[int, ...]] = [()] * num_rows  # of special rows alone

    def note_changes(self) -> None:
        self.any_draw = bool(self.draws.any())
        self.any_hold = bool(self.min_tokens.any())
        self.any_logprobs = bool((self.num_logprobs >= 0).any())

    def set_sampling(self, row: int, sampling: executor_pb2.RowSampling) -> None:
        self.min_tokens[row] = sampling.min_tokens
        self.draws[row] = sampling.temperature > 0
        seed, index = np.array([sampling.seed], np.uint64), np.array([sampling.index], np.uint64)
        self.draw_key[row] = draw_keys(seed, index)[0]
        self.num_logprobs[row] = sampling.logprobs if sampling.HasField("logprobs") else -1
        self.end_token_ids[row] = frozenset(sampling.end_token_ids)
        self.rules.pop(row, None)
        if (rules := read_rules(sampling)) is not NO_RULES:
            self.rules[row] = rules


class SimulatedRunner:
    """`Runner` over token ids. `block_size` slots in each of `num_blocks` blocks; block 0 is never read.

    With a latency it stands for a device that computes by itself.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        latency: Latency | None = None,
        script: Script | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._latency = latency or Latency()
        self._faults = script.faults if script else ()
        self._replies = {reply.prompt: reply.output for reply in script.replies} if script else {}
        named = {fault.row_of_prompt for fault in self._faults if fault.row_of_prompt is not None}
        self._special_prompts = named | self._replies.keys()
        self._memory = SlotMemory(num_blocks, block_size)
        self._rows = _RowColumns(num_rows)
        self._num_steps = 0
        self._launched: LaunchedStep | None = None
        self.overlaps = self._latency.takes_time

    def start_rows(self, starts: list[RowStart]) -> None:
        self._catch_up()
        rows = self._rows
        for start in starts:
            rows.last_token[start.row] = _NO_TOKEN
            rows.num_prompt[start.row] = start.num_prompt
            rows.set_sampling(start.row, start.sampling)
            prompt = tuple(start.token_ids[: start.num_prompt].tolist()) if self._special_prompts else ()
            rows.special[start.row] = prompt in self._special_prompts
            rows.prompt[start.row] = prompt
        rows.note_changes()

    def fork_rows(
        self,
        parents: Int32s,
        children: Int32s,
        sampling: list[executor_pb2.RowSampling],
        tokens: Int32s | None = None,
    ) -> None:
        self._catch_up()
        rows = self._rows
        for column in (rows.last_token, rows.num_prompt, rows.special):
            column[children] = column[parents]
        if tokens is not None:
            rows.last_token[children] = tokens
        prompts = [rows.prompt[parent] for parent in parents]
        for child, prompt, parameters in zip(children, prompts, sampling, strict=True):
            rows.prompt[child] = prompt
            rows.set_sampling(int(child), parameters)
        rows.note_changes()

    def end_rows(self, rows: Int32s) -> None:
        self._catch_up()
        self._rows.last_token[rows] = _NO_TOKEN
        self._rows.special[rows] = False
        for row in rows.tolist() if self._rows.rules else ():
            self._rows.rules.pop(row, None)

    def reset(self) -> None:
        self._launched = None
        self._memory.clear()
        self._rows = _RowColumns(len(self._rows.last_token))

    def launch(self, step: Step) -> LaunchedStep:
        takes_s = self._latency.step_s(step) if self._latency.takes_time else 0.0
        self._launched = LaunchedStep(partial(self._run, step), time.perf_counter() + takes_s)
        return self._launched

    def _catch_up(self) -> None:
        """With the step that was launched: what is asked for now comes after it."""
        if self._launched is not None:
            self._launched.compute()
            self._launched = None

    def _run(self, step: Step) -> StepOutput:
        self._num_steps += 1
        failing = self._fail_as_scripted(step) if self._faults else None
        if len(step.copy_sources):
            self._memory.copy(step.copy_sources, step.copy_destinations)
        self._write(step)
        sampled = self._sample(step)
        logprobs = self._logprobs(sampled)
        # A row to which nothing was left may be in the next step already.
        last_tokens = np.maximum(sampled.tokens, 0) if self._rows.rules else sampled.tokens
        self._rows.last_token[sampled.rows] = last_tokens
        ids = sampled.tokens if failing is None else np.where(failing[sampled.rows], np.int32(-1), sampled.tokens)
        return StepOutput(ids, logprobs, self._score(step, step.scored) if step.scored is not None else None)

    def _write(self, step: Step) -> None:
        if step.decodes:
            self._memory.write(step.slots, self._rows.last_token.take(step.rows))
            return
        ids = step.token_ids
        unknown = ids < 0
        if unknown.any():
            owners = step.rows
            if len(ids) != len(owners):
                owners = np.repeat(owners, np.diff(step.query_start))
            ids = np.where(unknown, self._rows.last_token[owners], ids)
            if ids.min() < 0:
                raise SimulatedFailure(f"row {owners[ids.argmin()]} computes a token before one was sampled")
        self._memory.write(step.slots, ids)

    def _sample(self, step: Step) -> _Sampled:
        rows, tables, lengths = step.rows, step.block_tables, step.context_lens
        if not step.decodes and not step.all_draw:
            rows, places = step.drawing_rows, step.drawing_places
            tables, lengths = tables[places], lengths[places]
        if not len(rows):
            return _Sampled(rows, np.empty(0, np.uint64), rows)
        try:
            # Whoever decodes has blocks for its context and none ahead: all that they hold is its context.
            contexts = self._memory.whole_contexts(tables) if step.decodes else self._memory.contexts(tables, lengths)
        except UnwrittenSlot as error:
            raise SimulatedFailure(f"row {rows[error.row]} with a context of {lengths[error.row]}: {error}") from error
        hashes = mix(contexts)
        if self._rows.any_draw:
            hashes = np.where(self._rows.draws[rows], mix(hashes ^ self._rows.draw_key[rows]), hashes)
        tokens = tokens_of(hashes, self._vocab_size)
        if self._rows.any_hold:
            held = lengths - self._rows.num_prompt[rows] < self._rows.min_tokens[rows]
            for i in np.flatnonzero(held):
                tokens[i] = pass_over(int(tokens[i]), self._rows.end_token_ids[rows[i]], self._vocab_size)
        if self._rows.rules or step.masks is not None:
            masks = {} if step.masks is None else self._allowed(step.masks)
            self._follow_rules(rows, tables, lengths, tokens_of(hashes, self._vocab_size), tokens, masks)
        if self._replies:
            self._reply_as_scripted(rows, lengths, tokens)
        return _Sampled(rows, hashes, tokens)

    def _follow_rules(
        self,
        rows: Int32s,
        tables: Int32s,
        lengths: Int32s,
        best: Int32s,
        tokens: Int32s,
        masks: dict[int, NDArray[np.int64]],
    ) -> None:
        """Choose anew for the rows that have rules or a mask; `best` are the tokens without any."""
        for i, row in enumerate(rows.tolist()):
            rules, mask = self._rows.rules.get(row), masks.get(i)
            if rules is not None or mask is not None:
                length = int(lengths[i])
                held = length - self._rows.num_prompt[row] < self._rows.min_tokens[row]
                last_ids = self._memory.last_ids(tables[i], length, MAX_BANNED_TOKENS)
                passed_over = self._rows.end_token_ids[row] if held else ()
                tokens[i] = choose(int(best[i]), rules or NO_RULES, last_ids, passed_over, self._vocab_size, mask)

    def _allowed(self, masks: Masks) -> dict[int, NDArray[np.int64]]:
        """The ids that each masked row may draw, by its place among those that draw."""
        bits = np.unpackbits(masks.allowed, axis=1, count=self._vocab_size, bitorder="little")
        return {place: np.flatnonzero(row) for place, row in zip(masks.places.tolist(), bits, strict=True)}

    def _reply_as_scripted(self, rows: Int32s, lengths: Int32s, tokens: Int32s) -> None:
        for i in np.flatnonzero(self._rows.special[rows]):
            reply = self._replies.get(self._rows.prompt[rows[i]], ())
            num_output = lengths[i] - self._rows.num_prompt[rows[i]]
            if num_output < len(reply):
                tokens[i] = reply[num_output]

    def _logprobs(self, sampled: _Sampled) -> Logprobs | None:
        if not self._rows.any_logprobs:
            return None
        asked = np.flatnonzero(self._rows.num_logprobs[sampled.rows] >= 0)
        if not len(asked):
            return None
        ids: list[Int32s] = []
        values: list[float] = []
        for i in asked:
            k = int(self._rows.num_logprobs[sampled.rows[i]])
            best, best_values = token_logprobs(int(sampled.tokens[i]), int(sampled.hashes[i]), k, self._vocab_size)
            ids.append(best)
            values += best_values
        return Logprobs(np.concatenate(ids), np.array(values, np.float32), np.ones(len(asked), np.int32))

    def _score(self, step: Step, scored: Scored) -> Logprobs:
        rows = np.searchsorted(step.query_start, scored.places, side="right") - 1
        hashes = mix(self._memory.contexts(step.block_tables[rows], step.positions[scored.places] + 1))
        wanted = zip(scored.targets.tolist(), hashes.tolist(), scored.num_top.tolist(), strict=True)
        entries = [score(target, context_hash, k, self._vocab_size) for target, context_hash, k in wanted]
        return Logprobs(
            ids=np.concatenate([ids for ids, _, _ in entries]),
            values=np.array([value for _, values, _ in entries for value in values], np.float32),
            ranks=np.array([rank for _, _, rank in entries], np.int32),
        )

    def _fail_as_scripted(self, step: Step) -> NDArray[np.bool_] | None:
        """Rows of the executor whose logits are to be not finite; other faults take effect here and now."""
        failing = np.zeros(len(self._rows.last_token), np.bool_)
        for fault in self._faults:
            rows = self._rows_of(fault, step)
            if fault.step not in (None, self._num_steps) or (fault.row_of_prompt is not None and not len(rows)):
                continue
            if fault.kind == "raise":
                raise SimulatedFailure(f"scripted failure of step {self._num_steps}")
            if fault.kind == "exit":
                os._exit(1)
            while fault.kind == "hang":
                time.sleep(3600)
            failing[rows] = True
        return failing

    def _rows_of(self, fault: ScriptedFault, step: Step) -> Int32s:
        rows = np.union1d(step.rows, step.drawing_rows)
        if fault.row_of_prompt is None:
            return rows
        special = rows[self._rows.special[rows]]
        return np.array([row for row in special if self._rows.prompt[row] == fault.row_of_prompt], np.int32)
