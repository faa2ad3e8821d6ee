"""Builds the columns and rows of plans for tests."""

from collections.abc import Sequence

import numpy as np

from executor_svc.batch import ResidentBatch
from executor_svc.leases import Lease, Ownership
from executor_svc.plan_checks import Limits
from executor_svc.shared_segments import MIN_SAVED_TOKENS
from paged.v1 import executor_pb2

SESSION = 1
OTHER_SESSION = 2


def column(values: Sequence[int]) -> bytes:
    return np.asarray(values, "<i4").tobytes()


def ids_of(data: bytes) -> list[int]:
    return np.frombuffer(data, "<i4").tolist()


def sampling(**changes: object) -> executor_pb2.RowSampling:
    """Greedy, with everything set as a scheduler sets it."""
    return executor_pb2.RowSampling(**{"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0, **changes})


def start(
    row: int,
    token_ids: Sequence[int],
    blocks: Sequence[int],
    *,
    num_prompt: int | None = None,
    num_computed: int = 0,
    parameters: executor_pb2.RowSampling | None = None,
) -> executor_pb2.StartedRow:
    return executor_pb2.StartedRow(
        row=row,
        token_ids=column(token_ids),
        num_prompt_tokens=len(token_ids) if num_prompt is None else num_prompt,
        num_computed_tokens=num_computed,
        blocks=column(blocks),
        sampling=parameters or sampling(),
    )


def schedule(plan: executor_pb2.StepPlan, *rows: tuple[int, int, bool]) -> executor_pb2.StepPlan:
    """Adds (row, tokens, samples) to a plan."""
    plan.scheduled_rows += column([row for row, _, _ in rows])
    plan.scheduled_tokens += column([tokens for _, tokens, _ in rows])
    plan.scheduled_samples += bytes(samples for _, _, samples in rows)
    return plan


def make_batch(
    *,
    num_rows: int = 4,
    num_blocks: int = 12,
    block_size: int = 4,
    vocab_size: int = 100,
    max_model_len: int = 24,
    rope_switch_len: int = 0,
    min_saved_tokens: int = MIN_SAVED_TOKENS,
) -> ResidentBatch:
    """A batch of which one session has all but the last row and the last two blocks; those are another session's."""
    ownership = Ownership(num_rows, num_blocks, tokens_per_step=32)
    rows, blocks = np.arange(num_rows, dtype=np.int32), np.arange(num_blocks, dtype=np.int32)
    ownership.lend(SESSION, Lease(blocks[1:-2], rows[:-1], tokens_per_step=16))
    ownership.lend(OTHER_SESSION, Lease(blocks[-2:], rows[-1:], tokens_per_step=16))
    limits = Limits(vocab_size, max_model_len, block_size, rope_switch_len)
    return ResidentBatch(ownership, limits, min_saved_tokens=min_saved_tokens)
