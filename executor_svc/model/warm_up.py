"""The largest steps, run once before anything is served: first calls are slow, and their time is a step's bound."""

import time

import numpy as np

from executor_svc.step import RowStart, Runner, Step
from paged.v1 import executor_pb2

_GREEDY = executor_pb2.RowSampling(top_p=1.0, repetition_penalty=1.0)


def warm_up(
    runner: Runner, *, num_blocks: int, block_size: int, max_rows: int, tokens_per_step: int, max_model_len: int
) -> int:
    """Run a step with a long prompt and one with all rows. Returns the longer one's milliseconds, at least 1."""
    room = (num_blocks - 1) * block_size
    prompt = min(tokens_per_step, max_model_len, room)
    rows = min(max_rows, tokens_per_step, num_blocks - 1)
    slowest = max(_timed_ms(runner, 1, prompt, block_size), _timed_ms(runner, rows, 1, block_size))
    runner.reset()
    return max(1, round(slowest))


def _timed_ms(runner: Runner, num_rows: int, num_tokens: int, block_size: int) -> float:
    """One step of `num_rows` rows that compute `num_tokens` each from their beginning on."""
    rows = np.arange(num_rows, dtype=np.int32)
    token_ids = np.zeros(num_tokens, np.int32)
    runner.start_rows([RowStart(row, token_ids, num_tokens, _GREEDY) for row in rows.tolist()])
    width = -(-num_tokens // block_size)
    tables = 1 + np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width)
    positions = np.tile(np.arange(num_tokens, dtype=np.int32), num_rows)
    blocks = tables[np.repeat(rows, num_tokens), positions // block_size].astype(np.int64)
    step = Step(
        rows=rows,
        query_start=np.arange(num_rows + 1, dtype=np.int32) * num_tokens,
        token_ids=np.tile(token_ids, num_rows),
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        block_tables=tables,
        context_lens=np.full(num_rows, num_tokens, np.int32),
        samples=np.ones(num_rows, np.bool_),
        copy_sources=np.empty(0, np.int32),
        copy_destinations=np.empty(0, np.int32),
    )
    begin = time.perf_counter()
    runner.run(step)
    elapsed_ms = (time.perf_counter() - begin) * 1e3
    runner.end_rows(rows)
    return elapsed_ms
