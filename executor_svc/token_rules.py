"""Which tokens a row may draw, and which it prefers: the rules in its sampling parameters, read and checked."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from executor_svc.plan import PlanViolation, read_int32s
from executor_svc.step import Int32s
from paged.v1 import executor_pb2

MAX_BIASES = 1024
MAX_BIAS = 1e4
MAX_ALLOWED_IDS = 4096
MAX_BANNED = 512
MAX_BANNED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TokenRules:
    """`biases` float32 are added to the logits of `bias_ids`; of `allowed_ids`, if there are any, one is drawn; the
    row's tokens, prompt included, do not come to end with one of `banned`."""

    bias_ids: Int32s
    biases: NDArray[np.float32]
    allowed_ids: Int32s
    banned: list[Int32s]

    @property
    def look_back(self) -> bool:
        """Whether what may be drawn depends on the tokens before."""
        return any(len(sequence) > 1 for sequence in self.banned)


NO_RULES = TokenRules(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32), [])


def has_rules(sampling: executor_pb2.RowSampling) -> bool:
    return bool(sampling.bias_ids or sampling.allowed_ids or sampling.banned_ids)


def read_rules(sampling: executor_pb2.RowSampling) -> TokenRules:
    """Of parameters that passed `check_rules`; NO_RULES where they have none."""
    if not has_rules(sampling):
        return NO_RULES
    lengths = read_int32s("banned_lengths", sampling.banned_lengths)
    banned = read_int32s("banned_ids", sampling.banned_ids)
    return TokenRules(
        bias_ids=read_int32s("bias_ids", sampling.bias_ids),
        biases=np.frombuffer(sampling.biases, "<f4"),
        allowed_ids=read_int32s("allowed_ids", sampling.allowed_ids),
        banned=np.split(banned, np.cumsum(lengths)[:-1]) if len(lengths) else [],
    )


def check_rules(column: str, sampling: executor_pb2.RowSampling, vocab_size: int) -> None:
    """Raises PlanViolation where a column cannot be read, is too long, or holds what the model does not have."""
    if not (has_rules(sampling) or sampling.biases or sampling.banned_lengths):
        return
    bias_ids = _read_ids(f"{column}.bias_ids", sampling.bias_ids, MAX_BIASES, vocab_size)
    if len(np.unique(bias_ids)) < len(bias_ids):
        raise PlanViolation(f"{column}.bias_ids", f"{len(bias_ids)} ids", "each may be there once")
    if len(sampling.biases) != len(sampling.bias_ids):
        found, expected = f"{len(sampling.biases)} bytes", f"bias_ids has {len(sampling.bias_ids)}"
        raise PlanViolation(f"{column}.biases", found, expected)
    within = np.abs(np.frombuffer(sampling.biases, "<f4")) <= MAX_BIAS  # NaN is not
    if not within.all():
        raise PlanViolation(f"{column}.biases", f"entry {within.argmin()}", f"must be in [-{MAX_BIAS:g}, {MAX_BIAS:g}]")
    _read_ids(f"{column}.allowed_ids", sampling.allowed_ids, MAX_ALLOWED_IDS, vocab_size)
    banned = _read_ids(f"{column}.banned_ids", sampling.banned_ids, MAX_BANNED * MAX_BANNED_TOKENS, vocab_size)
    lengths = read_int32s(f"{column}.banned_lengths", sampling.banned_lengths)
    if len(lengths) > MAX_BANNED:
        raise PlanViolation(f"{column}.banned_lengths", f"{len(lengths)} entries", f"at most {MAX_BANNED}")
    if len(lengths) and not (lengths.min() >= 1 and lengths.max() <= MAX_BANNED_TOKENS):
        found = f"a sequence of {lengths.min() if lengths.min() < 1 else lengths.max()} ids"
        raise PlanViolation(f"{column}.banned_lengths", found, f"must be 1 to {MAX_BANNED_TOKENS}")
    if int(lengths.sum(dtype=np.int64)) != len(banned):
        found = f"{lengths.sum(dtype=np.int64)} ids in all"
        raise PlanViolation(f"{column}.banned_lengths", found, f"banned_ids has {len(banned)}")


def _read_ids(column: str, data: bytes, most: int, vocab_size: int) -> Int32s:
    ids = read_int32s(column, data)
    if len(ids) > most:
        raise PlanViolation(column, f"{len(ids)} entries", f"at most {most}")
    outside = ids.view(np.uint32) >= vocab_size  # a negative id is a huge unsigned one
    if outside.any():
        raise PlanViolation(column, f"id {ids[outside.argmax()]}", f"must be in [0, {vocab_size})")
    return ids
