"""Sequences driven through a runner step by step, with the least bookkeeping that does."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from executor_svc.model.runner import ModelRunner
from executor_svc.step import RowStart, Step, StepOutput
from paged.v1 import executor_pb2

_NONE = np.empty(0, np.int32)


def greedy(**parameters: object) -> executor_pb2.RowSampling:
    """Unless parameters say otherwise."""
    return executor_pb2.RowSampling(**{"top_p": 1.0, "repetition_penalty": 1.0, **parameters})  # type: ignore[arg-type]


@dataclass(slots=True)
class Sequence:
    """`logprobs`, one an output: ids (the drawn token, then the most likely) and their log-probabilities."""

    token_ids: list[int]
    num_prompt: int
    sampling: executor_pb2.RowSampling
    num_computed: int = 0
    table: list[int] = field(default_factory=list)
    logprobs: list[tuple[list[int], list[float]]] = field(default_factory=list)

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.num_prompt


class Rows:
    """All sequences of a runner, from a new epoch on; row i is the i-th that began. Blocks come in no order."""

    def __init__(self, runner: ModelRunner, num_blocks: int, block_size: int) -> None:
        runner.reset()
        self._runner = runner
        self._block_size = block_size
        self._free = (1 + np.random.default_rng(0).permutation(num_blocks - 1)).tolist()
        self.sequences: list[Sequence] = []

    def begin(self, prompt: list[int], sampling: executor_pb2.RowSampling) -> int:
        """Returns the row."""
        row = len(self.sequences)
        self.sequences.append(Sequence(list(prompt), len(prompt), sampling))
        self._runner.start_rows([RowStart(row, np.array(prompt, np.int32), len(prompt), sampling)])
        return row

    def run(self, rows: list[int], most_tokens: int = 1 << 20) -> StepOutput:
        """One step of these rows, of at most so many tokens each."""
        step = self.step(rows, most_tokens)
        output = self._runner.launch(step).result()
        self.take(step, output)
        return output

    def step(self, rows: list[int], most_tokens: int = 1 << 20) -> Step:
        """The step that comes next for these rows, which are then taken to have computed it."""
        sequences = [self.sequences[row] for row in rows]
        first = np.array([sequence.num_computed for sequence in sequences], np.int32)
        known = np.array([len(sequence.token_ids) for sequence in sequences], np.int32)
        counts = np.minimum(known - first, most_tokens)
        ends = first + counts
        for sequence, end in zip(sequences, ends.tolist(), strict=True):
            while len(sequence.table) * self._block_size < end:
                sequence.table.append(self._free.pop())
            sequence.num_computed = end
        tables = np.zeros((len(rows), max(len(sequence.table) for sequence in sequences)), np.int32)
        for i, sequence in enumerate(sequences):
            tables[i, : len(sequence.table)] = sequence.table
        query_start = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
        of_token = np.repeat(np.arange(len(rows)), counts)
        positions = (np.arange(len(of_token)) - query_start[of_token] + first[of_token]).astype(np.int32)
        blocks = tables[of_token, positions // self._block_size].astype(np.int64)
        return Step(
            rows=np.array(rows, np.int32),
            query_start=query_start,
            token_ids=self._token_ids(rows, first, ends),
            positions=positions,
            slots=blocks * self._block_size + positions % self._block_size,
            block_tables=tables,
            context_lens=ends,
            samples=ends == known,
            copy_sources=_NONE,
            copy_destinations=_NONE,
            decodes=bool((counts == 1).all() and all(sequence.num_outputs > 0 for sequence in sequences)),
        )

    def _token_ids(self, rows: list[int], first: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """-1 for what was sampled: the runner has it."""
        ids = []
        for row, begin, end in zip(rows, first.tolist(), ends.tolist(), strict=True):
            sequence = self.sequences[row]
            prompt = sequence.token_ids[begin : min(end, sequence.num_prompt)]
            ids += [*prompt, *[-1] * (end - begin - len(prompt))]
        return np.array(ids, np.int32)

    def take(self, step: Step, output: StepOutput) -> None:
        """Append what was sampled."""
        begin = 0
        rows = step.rows[step.samples].tolist()
        for row, token in zip(rows, output.sampled_ids.tolist(), strict=True):
            sequence = self.sequences[row]
            sequence.token_ids.append(token)
            if output.logprobs is not None and sequence.sampling.HasField("logprobs"):
                end = begin + sequence.sampling.logprobs + 1
                ids, values = output.logprobs.ids[begin:end].tolist(), output.logprobs.values[begin:end].tolist()
                sequence.logprobs.append((ids, values))
                begin = end


@contextmanager
def watched_launches(
    runner: ModelRunner, around: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Iterator[list[float]]:
    """Seconds of each `runner.launch`: what the host does until all of a step's work is given to the device.

    `around` is entered for the length of each.
    """
    seconds: list[float] = []
    launch = runner.launch

    def watched(step: Step) -> object:
        began = time.perf_counter()
        with around():
            launched = launch(step)
        seconds.append(time.perf_counter() - began)
        return launched

    runner.launch = watched  # type: ignore[method-assign,assignment]
    try:
        yield seconds
    finally:
        del runner.launch  # the class's own is seen again
