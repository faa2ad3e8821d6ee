"""Masks of a plan: which rows, in this step alone, draw from some ids only."""

import numpy as np

from executor_svc.plan import PlanColumns, PlanViolation
from executor_svc.plan_checks import check_unique
from executor_svc.step import Masks, Step, mask_bytes


def read_masks(plan: PlanColumns, vocab_size: int) -> Masks | None:
    """None where no row has one. Raises PlanViolation."""
    rows = plan.mask_rows
    size = mask_bytes(vocab_size)
    if len(plan.masks) != len(rows) * size:
        found = f"{len(plan.masks)} bytes"
        raise PlanViolation("masks", found, f"{len(rows)} mask_rows have {size} each with {vocab_size} ids")
    if not len(rows):
        return None
    check_unique("mask_rows", rows)
    drawing_rows = plan.scheduled_rows[plan.scheduled_samples]
    draws = np.isin(rows, drawing_rows)
    if not draws.all():
        raise PlanViolation("mask_rows", f"row {rows[draws.argmin()]}", "is not scheduled to sample")
    allowed = np.frombuffer(plan.masks, np.uint8).reshape(len(rows), size)
    some = _within(allowed, vocab_size).any(axis=1)
    if not some.all():
        raise PlanViolation("masks", f"that of row {rows[some.argmin()]}", f"allows no id below {vocab_size}")
    order = np.argsort(drawing_rows, kind="stable")
    places = order[np.searchsorted(drawing_rows, rows, sorter=order)]
    ascending = np.argsort(places)
    return Masks(places[ascending].astype(np.int32), allowed[ascending])


def merge_masks(steps: list[Step]) -> Masks | None:
    """Those of steps that are run as one, in their order."""
    if all(step.masks is None for step in steps):
        return None
    places, allowed, num_before = [], [], 0
    for step in steps:
        if step.masks is not None:
            places.append(step.masks.places + num_before)
            allowed.append(step.masks.allowed)
        num_before += len(step.drawing_rows)
    return Masks(np.concatenate(places).astype(np.int32, copy=False), np.concatenate(allowed))


def _within(allowed: np.ndarray, vocab_size: int) -> np.ndarray:
    """The same without bits past the vocabulary."""
    whole, rest = divmod(vocab_size, 8)
    if not rest:
        return allowed[:, :whole]
    return np.concatenate([allowed[:, :whole], allowed[:, whole : whole + 1] & ((1 << rest) - 1)], axis=1)
