"""The rules that forks of a plan must meet, beyond those of ids. Each raises PlanViolation and changes nothing."""

import numpy as np
from numpy.typing import NDArray

from executor_svc.applied_plan import Forks
from executor_svc.plan import PlanViolation
from executor_svc.step import Int32s
from paged.v1 import executor_pb2


def counts_tokens(sampling: executor_pb2.RowSampling) -> bool:
    """Whether a row needs to know how often each token is in it: for any other, tokens are not counted."""
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def check_counts(column: str, forks: Forks, counts: NDArray[np.int32]) -> None:
    """No child has a penalty whose parent has none. `counts` is 1 for rows with a penalty, else 0."""
    for parent, child, sampling in zip(forks.parents, forks.children, forks.sampling, strict=True):
        if counts_tokens(sampling) and not counts[parent]:
            limit = f"its parent, row {parent}, has none and has not counted its tokens; start the row by itself"
            raise PlanViolation(column, f"a penalty in row {child}", limit)


def check_replaced(forks: Forks, exist: Int32s, sampled: Int32s, computed: Int32s) -> None:
    """Each parent has sampled its last token, and not computed it; no child counts tokens. Columns are of all rows."""
    parents = forks.parents
    open_ends = (sampled.take(parents) > 0) & (computed.take(parents) == exist.take(parents) - 1)
    if not open_ends.all():
        found = f"of row {parents[open_ends.argmin()]}"
        raise PlanViolation("fork_tokens", found, "its last token must be sampled, and not computed")
    for child, sampling in zip(forks.children, forks.sampling, strict=True):
        if counts_tokens(sampling):
            raise PlanViolation("fork_tokens", f"of row {child}", "has a penalty, for which other tokens are counted")
