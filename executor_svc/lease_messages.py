"""Leases as messages of executor.proto, and what plans say of them."""

import numpy as np

from executor_svc.leases import Amounts, Lease
from executor_svc.lending import Change
from executor_svc.plan import PlanViolation, read_int32s
from executor_svc.step import Int32s
from paged.v1 import executor_pb2


def first_lease(lease: Lease, most: Amounts, plans_in_flight: int) -> executor_pb2.Lease:
    return executor_pb2.Lease(
        block_ids=_column(lease.block_ids),
        row_ids=_column(lease.row_ids),
        tokens_per_step=lease.tokens_per_step,
        plans_in_flight=plans_in_flight,
        most_blocks=most.blocks,
        most_rows=most.rows,
        most_tokens_per_step=most.tokens,
    )


def lease_change(change: Change, epoch: int) -> executor_pb2.LeaseChange:
    message = executor_pb2.LeaseChange(epoch=epoch, session=change.session)
    if change.granted is not None:
        message.granted_blocks = _column(change.granted.block_ids)
        message.granted_rows = _column(change.granted.row_ids)
        message.granted_tokens_per_step = change.granted.tokens_per_step
    if change.recall is not None:
        recall = change.recall
        message.recall.CopyFrom(
            executor_pb2.Recall(blocks=recall.blocks, rows=recall.rows, tokens_per_step=recall.tokens)
        )
    return message


def read_demand(demand: executor_pb2.Demand, most: Amounts) -> tuple[Amounts, Amounts]:
    """What is wanted, and what one of the requests cannot go on without; nobody can use more than there is."""
    wants = Amounts(
        min(demand.blocks, most.blocks), min(demand.rows, most.rows), min(demand.tokens_per_step, most.tokens)
    )
    least_rows = min(demand.least_rows, most.rows)
    return wants, Amounts(min(demand.least_blocks, most.blocks), least_rows, 0)


def returns_anything(plan: executor_pb2.StepPlan) -> bool:
    return bool(plan.returned_blocks or plan.returned_rows or plan.returned_tokens_per_step)


def read_returned(plan: executor_pb2.StepPlan, held: Amounts) -> Lease:
    """What the plan returns. Raises PlanViolation where a column cannot be read, or more tokens are returned than held;
    whose the ids are is looked at elsewhere."""
    tokens = plan.returned_tokens_per_step
    if tokens > held.tokens:
        raise PlanViolation("returned_tokens_per_step", f"{tokens}", f"the lease has {held.tokens}")
    return Lease(
        read_int32s("returned_blocks", plan.returned_blocks), read_int32s("returned_rows", plan.returned_rows), tokens
    )


def _column(ids: Int32s) -> bytes:
    return np.asarray(ids, "<i4").tobytes()
