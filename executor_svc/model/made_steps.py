"""Steps made up to measure with: rows of chosen lengths, each in blocks of its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from executor_svc.step import RowStart, Runner, Step, StepOutput
from paged.v1 import executor_pb2

SamplingOf = Callable[[int], executor_pb2.RowSampling]
"""The parameters of a row."""


def greedy(_: int) -> executor_pb2.RowSampling:
    return executor_pb2.RowSampling(top_p=1.0, repetition_penalty=1.0)


def everything(row: int) -> executor_pb2.RowSampling:
    """All that can be asked for; with rules that no other row has, as rows of equal rules share what these take."""
    return executor_pb2.RowSampling(
        temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1,
        frequency_penalty=0.1, seed=1, min_tokens=1 << 20, end_token_ids=[0], logprobs=20,
        bias_ids=_int32s(1), biases=np.array([row / 1024], "<f4").tobytes(),
        banned_ids=_int32s(1, 0), banned_lengths=_int32s(2),
    )  # fmt: skip


def _int32s(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


@dataclass(frozen=True, slots=True)
class MadeStep:
    """A step, and how its rows begin."""

    starts: list[RowStart]
    step: Step

    def run(self, runner: Runner) -> StepOutput:
        """In rows that begin for it and end after it."""
        runner.start_rows(self.starts)
        output = runner.launch(self.step).result()
        runner.end_rows(self.step.rows)
        return output


def make_step(
    num_tokens: Sequence[int],
    block_size: int,
    *,
    sampling: SamplingOf = greedy,
    num_blocks: int | None = None,
    table_width: int = 1,
) -> MadeStep:
    """Row i computes `num_tokens[i]` tokens from its beginning on, and samples.

    Rows take blocks of their own from block 1 on; with `num_blocks`, from 1 again when those are used up, so what
    they compute means nothing. Tables have `table_width` entries at least.
    """
    tokens = np.array(num_tokens, np.int32)
    width = -(-int(tokens.max()) // block_size)
    tables = np.arange(len(tokens) * width, dtype=np.int32).reshape(len(tokens), width)
    tables = 1 + (tables if num_blocks is None else tables % (num_blocks - 1))
    rows, query_start = np.arange(len(tokens), dtype=np.int32), np.cumsum([0, *tokens], dtype=np.int32)
    token_rows = rows.repeat(tokens)
    positions = np.arange(len(token_rows), dtype=np.int32) - query_start[token_rows]
    slots = tables[token_rows, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return MadeStep(
        [RowStart(row, np.zeros(count, np.int32), count, sampling(row)) for row, count in enumerate(tokens.tolist())],
        Step(
            rows=rows,
            query_start=query_start,
            token_ids=np.zeros(len(token_rows), np.int32),
            positions=positions,
            slots=slots,
            block_tables=np.pad(tables, ((0, 0), (0, max(0, table_width - width)))),
            context_lens=tokens,
            samples=np.ones(len(rows), np.bool_),
            copy_sources=np.empty(0, np.int32),
            copy_destinations=np.empty(0, np.int32),
        ),
    )


def largest_step(max_rows: int, tokens_per_step: int, max_model_len: int) -> list[int]:
    """Tokens of each row in a step with as many rows and tokens as there can be, and the longest prompts among them."""
    tokens, spare = [], tokens_per_step - min(max_rows, tokens_per_step)
    for _ in range(min(max_rows, tokens_per_step)):
        tokens.append(1 + min(spare, max_model_len - 1))
        spare -= tokens[-1] - 1
    return tokens
