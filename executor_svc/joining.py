"""Joined rows of a plan: further samples of a prompt whose last token another row computes in the same step.

In the schedule they stand with no tokens behind that row. They are taken out of it here: what remains is computed, and
who draws a token from whose logits is kept apart.
"""

from dataclasses import dataclass, replace

import numpy as np

from executor_svc.applied_plan import NO_FORKS, Forks
from executor_svc.plan import PlanColumns, PlanViolation
from executor_svc.step import Draws


@dataclass(frozen=True, slots=True)
class Joining:
    """`computing` is the plan with a schedule of rows that compute alone; `draws` None: those that sample, for
    themselves."""

    computing: PlanColumns
    forks: Forks
    draws: Draws | None


def read_joined(plan: PlanColumns) -> Joining:
    """Raises PlanViolation where joined rows and schedule do not fit; ids are looked at elsewhere."""
    if not plan.joined:
        return Joining(plan, NO_FORKS, None)
    joined = np.array([entry.row for entry in plan.joined], np.int32)
    likes = np.array([entry.like for entry in plan.joined], np.int32)
    rows, tokens, samples = plan.scheduled_rows, plan.scheduled_tokens, plan.scheduled_samples
    joins = np.isin(rows, joined)
    if not np.array_equal(rows[joins], joined) or tokens[joins].any() or not samples[joins].all():
        raise PlanViolation(
            "joined.row", f"{len(joined)} rows", "must be scheduled in this order, with 0 tokens, to sample"
        )
    computing = ~joins
    places = (computing.cumsum() - 1).astype(np.int32)
    behind = places[joins]
    if behind.min() < 0 or not np.array_equal(rows[computing][behind], likes) or not samples[computing][behind].all():
        raise PlanViolation("joined.like", f"{len(likes)} rows", "must each sample right before those that are like it")
    return Joining(
        replace(
            plan,
            scheduled_rows=rows[computing],
            scheduled_tokens=tokens[computing],
            scheduled_samples=samples[computing],
        ),
        Forks(likes, joined, [entry.sampling for entry in plan.joined]),
        Draws(rows[samples], places[samples]),
    )
