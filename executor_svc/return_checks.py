"""The rules that what a plan returns of its session's lease must meet."""

import numpy as np
from numpy.typing import NDArray

from executor_svc.leases import Lease, Ownership
from executor_svc.plan import PlanViolation
from executor_svc.plan_checks import check_owned, check_unique
from executor_svc.step import Int32s


def check_returned(
    returned: Lease, session: int, ownership: Ownership, live: NDArray[np.bool_], tables: Int32s
) -> None:
    """Raises PlanViolation unless all of it is the session's, each once, and nothing is in use. `live` and `tables` are
    all rows', as the plan has left them."""
    for column, ids, owner in (
        ("returned_rows", returned.row_ids, ownership.of_row),
        ("returned_blocks", returned.block_ids, ownership.of_block),
    ):
        check_owned(column, ids, owner, session)
        check_unique(column, ids)
    if (used := live.take(returned.row_ids)).any():
        raise PlanViolation("returned_rows", f"row {returned.row_ids[used.argmax()]}", "is live")
    if (used := np.isin(returned.block_ids, tables[live & (ownership.of_row == session)])).any():
        found = f"block {returned.block_ids[used.argmax()]}"
        raise PlanViolation("returned_blocks", found, "is in the table of one of the session's rows")
