"""What the executor says is checked before it is believed."""

import numpy as np
import pytest

from paged.v1 import executor_pb2 as pb
from scheduler_svc.core.plan import Amounts, Lease, LeaseChange
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, TokenLogprobs
from scheduler_svc.link.codec import (
    MAX_BLOCK_SIZE,
    MAX_END_IDS,
    MAX_MODEL_LEN,
    MAX_TEXT_BYTES,
    MAX_VOCAB_SIZE,
    MalformedMessage,
    decode_lease,
    decode_lease_change,
    decode_result,
    encode_plan,
)


def int32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def attached(**lease: object) -> pb.Attached:
    fields = {"block_ids": int32(1, 2), "row_ids": int32(0), "tokens_per_step": 8, "plans_in_flight": 2} | lease
    model = pb.ModelFacts(block_size=16, max_model_len=100, vocab_size=50)
    return pb.Attached(lease=pb.Lease(**fields), model=model)  # type: ignore[arg-type]


def test_a_sound_lease_is_taken() -> None:
    lease = decode_lease(attached())
    assert (list(lease.block_ids), lease.row_ids, lease.max_model_len) == ([1, 2], [0], 100)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("block_ids", b""),
        ("block_ids", b"\1\2\3"),
        ("block_ids", int32(1, 1)),
        ("block_ids", int32(0, 1)),
        ("block_ids", int32(2**31 - 1)),
        ("row_ids", b""),
        ("row_ids", int32(-1)),
        ("row_ids", int32(1 << 16)),
        ("tokens_per_step", 0),
        ("plans_in_flight", 0),
        ("plans_in_flight", 2**32 - 1),
        ("most_tokens_per_step", 2**32 - 1),
    ],
)
def test_a_lease_that_cannot_be_worked_with_is_refused(column: str, value: object) -> None:
    with pytest.raises(MalformedMessage):
        decode_lease(attached(**{column: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("block_size", MAX_BLOCK_SIZE + 1),
        ("max_model_len", 0),
        ("max_model_len", MAX_MODEL_LEN + 1),
        ("vocab_size", 0),
        ("vocab_size", MAX_VOCAB_SIZE + 1),
        ("eos_token_ids", [7] * (MAX_END_IDS + 1)),
        ("name", "é" * (MAX_TEXT_BYTES // 2 + 1)),
        ("fingerprint", "f" * (MAX_TEXT_BYTES + 1)),
    ],
)
def test_a_model_that_cannot_be_is_refused(field: str, value: object) -> None:
    message = attached()
    message.model.MergeFrom(pb.ModelFacts(**{field: value}))  # type: ignore[arg-type]
    if value == 0:
        message.model.ClearField(field)
    with pytest.raises(MalformedMessage, match=r"model\.|text"):
        decode_lease(message)


def test_an_executors_id_is_no_longer_than_others_take_it() -> None:
    message = attached()
    message.executor_id = "e" * MAX_TEXT_BYTES
    decode_lease(message)
    message.executor_id += "e"
    with pytest.raises(MalformedMessage, match="text"):
        decode_lease(message)


def test_log_probabilities_go_to_the_rows_that_asked() -> None:
    message = pb.StepResult(
        sampled_ids=int32(7, 8, 9),
        logprob_ids=int32(7, 7, 5, 9),
        logprobs=np.array([-1, -1, -2, -0.5], "<f4").tobytes(),
        logprob_ranks=int32(1, 3),
    )
    assert decode_result(message, [2, None, 0]).logprobs == [
        TokenLogprobs(-1.0, 1, [7, 5], [-1.0, -2.0]),
        None,
        TokenLogprobs(-0.5, 3, [], []),
    ]
    with pytest.raises(MalformedMessage):
        decode_result(message, [2, None, 1])


def test_a_change_of_the_lease_is_taken() -> None:
    recall = pb.Recall(blocks=3, rows=1, tokens_per_step=9)
    message = pb.LeaseChange(granted_blocks=int32(7, 9), granted_tokens_per_step=4, recall=recall)
    assert decode_lease_change(message) == LeaseChange([7, 9], [], 4, Amounts(3, 1, 9))
    assert decode_lease_change(pb.LeaseChange()) == LeaseChange()


@pytest.mark.parametrize(
    "columns",
    [
        {"granted_blocks": int32(0)},
        {"granted_blocks": int32(4, 4)},
        {"granted_blocks": b"\1"},
        {"granted_rows": int32(-1)},
    ],
)
def test_a_change_that_cannot_be_is_refused(columns: dict[str, bytes]) -> None:
    with pytest.raises(MalformedMessage):
        decode_lease_change(pb.LeaseChange(**columns))


def test_a_plan_tells_what_it_returns_and_what_is_wanted() -> None:
    scheduler = Scheduler()
    scheduler.attach(Lease([1, 2, 3, 4], [0, 1], 8, 4, most_lent=Amounts(9, 4, 16)))
    scheduler.submit(Sequence("r", [1] * 6, 2))
    scheduler.change_lease(LeaseChange(keep=Amounts(2, 1, 5)))
    plan = scheduler.plan()
    assert plan is not None
    message = pb.ToExecutor.FromString(encode_plan(plan, 1, 1)).plan
    assert (message.returned_blocks, message.returned_rows) == (int32(1, 2), int32(1))
    assert message.returned_tokens_per_step == 3
    assert (message.demand.rows, message.demand.least_rows) == (1, 1)
