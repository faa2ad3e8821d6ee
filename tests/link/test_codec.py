"""What the executor says is checked before it is believed."""

import numpy as np
import pytest

from paged.v1 import executor_pb2 as pb
from scheduler_svc.core.sequence import TokenLogprobs
from scheduler_svc.link.codec import MalformedMessage, decode_lease, decode_result


def int32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def attached(**lease: object) -> pb.Attached:
    fields = {"block_ids": int32(1, 2), "row_ids": int32(0), "tokens_per_step": 8, "plans_in_flight": 2} | lease
    model = pb.ModelFacts(block_size=16, max_model_len=100, vocab_size=50)
    return pb.Attached(lease=pb.Lease(**fields), model=model)  # type: ignore[arg-type]


def test_a_sound_lease_is_taken() -> None:
    lease = decode_lease(attached())
    assert (lease.block_ids, lease.row_ids, lease.max_model_len) == ([1, 2], [0], 100)


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
    ],
)
def test_a_lease_that_cannot_be_worked_with_is_refused(column: str, value: object) -> None:
    with pytest.raises(MalformedMessage):
        decode_lease(attached(**{column: value}))


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
