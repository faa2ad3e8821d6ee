"""Drives a loaded model as a scheduler would, plan by plan, with the least bookkeeping that does."""

from dataclasses import dataclass, field

import numpy as np

from executor_svc.batch import ResidentBatch
from executor_svc.leases import Lease, Ownership
from executor_svc.loaded import LoadedModel
from executor_svc.plan import read_plan
from executor_svc.plan_checks import Limits
from executor_svc.shared_segments import MIN_SAVED_TOKENS
from executor_svc.step import Logprobs
from executor_svc.stepper import Stepper
from paged.v1 import executor_pb2

SESSION = 1


def row_sampling(**parameters) -> executor_pb2.RowSampling:
    """Greedy unless told otherwise."""
    return executor_pb2.RowSampling(**{"top_p": 1.0, "repetition_penalty": 1.0, **parameters})


@dataclass
class Sequence:
    token_ids: list[int]
    num_prompt: int
    sampling: executor_pb2.RowSampling
    num_computed: int = 0
    table: list[int] = field(default_factory=list)
    logprobs: list[tuple[list[int], list[float], int]] = field(default_factory=list)

    @property
    def outputs(self) -> list[int]:
        return self.token_ids[self.num_prompt :]


class Driver:
    """Blocks come from a shuffled list, so that a table is never what it would be in contiguous memory."""

    def __init__(self, loaded: LoadedModel, max_rows: int, *, min_saved_tokens: int = MIN_SAVED_TOKENS) -> None:
        facts = loaded.facts
        self.block_size = facts.block_size
        ownership = Ownership(max_rows, loaded.num_blocks, 1 << 20)
        blocks = np.arange(1, loaded.num_blocks, dtype=np.int32)
        ownership.lend(SESSION, Lease(blocks, np.arange(max_rows, dtype=np.int32), 1 << 20))
        limits = Limits(facts.vocab_size, facts.max_model_len, facts.block_size, facts.rope_switch_len)
        self._batch = ResidentBatch(ownership, limits, min_saved_tokens=min_saved_tokens)
        self._stepper = Stepper(self._batch, loaded.runner)
        self._stepper.reset()
        self._free = np.random.default_rng(0).permutation(blocks).tolist()
        self._free_rows = list(range(max_rows))[::-1]
        self.sequences: dict[int, Sequence] = {}
        self.prompt_logprobs: Logprobs | None = None  # of the last step
        self._plan = executor_pb2.StepPlan()

    def start(self, sequence: Sequence, *, shared_from: Sequence | None = None, num_shared: int = 0) -> int:
        """A sequence begins in a row; its first `num_shared` tokens are read from the other's blocks."""
        row = self._free_rows.pop()
        sequence.num_computed = num_shared
        sequence.table = list(shared_from.table[: num_shared // self.block_size]) if shared_from else []
        self._plan.started.add(
            row=row,
            token_ids=np.array(sequence.token_ids, "<i4").tobytes(),
            num_prompt_tokens=sequence.num_prompt,
            num_computed_tokens=num_shared,
            blocks=np.array(sequence.table, "<i4").tobytes(),
            sampling=sequence.sampling,
        )
        self.sequences[row] = sequence
        return row

    def fork(self, parent: int, sampling: executor_pb2.RowSampling) -> int:
        """A copy of a row; both go on in the parent's blocks, but for the last, partly filled one, which is copied."""
        child = self._free_rows.pop()
        before = self.sequences[parent]
        sequence = Sequence(
            list(before.token_ids), before.num_prompt, sampling, before.num_computed, list(before.table)
        )
        self._plan.fork_parents += np.array([parent], "<i4").tobytes()
        self._plan.fork_children += np.array([child], "<i4").tobytes()
        self._plan.fork_sampling.append(sampling)
        if sequence.num_computed % self.block_size:
            source, destination = sequence.table[-1], self._free.pop()
            sequence.table[-1] = destination
            for column, value in (("rows", child), ("sources", source), ("destinations", destination)):
                name = f"copy_{column}"
                setattr(self._plan, name, getattr(self._plan, name) + np.array([value], "<i4").tobytes())
        self.sequences[child] = sequence
        return child

    def end(self, row: int) -> Sequence:
        """The row is free in the next plan; blocks are not handed out again unless `reuse` gives them back."""
        self._plan.ended_rows += np.array([row], "<i4").tobytes()
        self._free_rows.insert(0, row)
        return self.sequences.pop(row)

    def reuse(self, blocks: list[int]) -> None:
        self._free.extend(blocks)

    def step(self, chunk: int | None = None, rows: list[int] | None = None) -> dict[int, int]:
        """One step over all rows, or those given, of at most `chunk` tokens each. Returns what each row sampled."""
        plan, self._plan = self._plan, executor_pb2.StepPlan()
        scheduled = list(self.sequences) if rows is None else rows
        tokens = []
        for row in scheduled:
            sequence = self.sequences[row]
            missing = len(sequence.token_ids) - sequence.num_computed
            tokens.append(min(missing, chunk or missing))
            end = sequence.num_computed + tokens[-1]
            while len(sequence.table) * self.block_size < end:
                sequence.table.append(self._free.pop())
                plan.appended_rows += np.array([row], "<i4").tobytes()
                plan.appended_blocks += np.array([sequence.table[-1]], "<i4").tobytes()
            sequence.num_computed = end
        samples = [self.sequences[row].num_computed == len(self.sequences[row].token_ids) for row in scheduled]
        plan.scheduled_rows = np.array(scheduled, "<i4").tobytes()
        plan.scheduled_tokens = np.array(tokens, "<i4").tobytes()
        plan.scheduled_samples = bytes(samples)
        output = self._stepper.run([self._batch.apply(read_plan(plan), SESSION)])
        sampling_rows = [row for row, does in zip(scheduled, samples, strict=True) if does]
        self._take_logprobs(sampling_rows, output.logprobs)
        self.prompt_logprobs = output.prompt_logprobs
        sampled = dict(zip(sampling_rows, output.sampled_ids.tolist(), strict=True))
        for row, token in sampled.items():
            self.sequences[row].token_ids.append(token)
        return sampled

    def generate(self, sequences: list[Sequence], num_outputs: int, chunk: int | None = None) -> None:
        """Start all at once and step until each has its outputs; rows end as they are done."""
        self.run([self.start(sequence) for sequence in sequences], num_outputs, chunk)

    def run(self, rows: list[int], num_outputs: int, chunk: int | None = None) -> None:
        while rows := [row for row in rows if len(self.sequences[row].outputs) < num_outputs or self.end(row) is None]:
            self.step(chunk, rows)

    def _take_logprobs(self, rows: list[int], logprobs) -> None:
        asking = [row for row in rows if self.sequences[row].sampling.HasField("logprobs")]
        assert (logprobs is None) == (not asking)
        begin = 0
        for i, row in enumerate(asking):
            end = begin + self.sequences[row].sampling.logprobs + 1
            ids, values = logprobs.ids[begin:end].tolist(), logprobs.values[begin:end].tolist()
            self.sequences[row].logprobs.append((ids, values, int(logprobs.ranks[i])))
            begin = end
