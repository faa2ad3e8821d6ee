"""The rules that forks of a plan must meet, beyond those of ids. Each raises PlanViolation and changes nothing."""

import numpy as np
from numpy.typing import NDArray

from executor_svc.applied_plan import Forks
from executor_svc.plan import PlanViolation
from executor_svc.step import Int32s
from executor_svc.token_rules import has_rules, read_rules
from paged.v1 import executor_pb2

_PENALTY, _LOOKS_BACK = 1, 2


def remembered(sampling: executor_pb2.RowSampling) -> int:
    """What a row must know of its tokens, as a set of bits: for any other row, nobody has kept it."""
    penalty = sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    looks_back = has_rules(sampling) and read_rules(sampling).look_back
    return _PENALTY * penalty + _LOOKS_BACK * looks_back


def check_past(column: str, forks: Forks, remembered_of: NDArray[np.int32]) -> None:
    """No child must know what its parent has not kept. `remembered_of` each row is the set of bits."""
    for parent, child, sampling in zip(forks.parents, forks.children, forks.sampling, strict=True):
        lacking = remembered(sampling) & ~int(remembered_of[parent])
        if lacking:
            what = "a penalty" if lacking & _PENALTY else "a banned sequence of several tokens"
            limit = f"its parent, row {parent}, has none and has not kept its tokens for it; start the row by itself"
            raise PlanViolation(column, f"{what} in row {child}", limit)


def check_replaced(forks: Forks, exist: Int32s, sampled: Int32s, computed: Int32s) -> None:
    """Each parent has sampled its last token, and not computed it; no child must know its tokens. Columns: all rows."""
    parents = forks.parents
    open_ends = (sampled.take(parents) > 0) & (computed.take(parents) == exist.take(parents) - 1)
    if not open_ends.all():
        found = f"of row {parents[open_ends.argmin()]}"
        raise PlanViolation("fork_tokens", found, "its last token must be sampled, and not computed")
    for child, sampling in zip(forks.children, forks.sampling, strict=True):
        if remembered(sampling):
            limit = "has a penalty or a banned sequence, for which its parent's token is remembered"
            raise PlanViolation("fork_tokens", f"of row {child}", limit)
