"""Sampling parameters with rules about tokens, as a plan carries them."""

from collections.abc import Mapping, Sequence

import numpy as np

Rules = dict[str, bytes]


def rule_columns(
    *,
    bias: Mapping[int, float] | None = None,
    allowed: Sequence[int] = (),
    banned: Sequence[Sequence[int]] = (),
) -> Rules:
    """Fields of RowSampling."""
    return {
        "bias_ids": np.array(list(bias or {}), "<i4").tobytes(),
        "biases": np.array(list((bias or {}).values()), "<f4").tobytes(),
        "allowed_ids": np.array(allowed, "<i4").tobytes(),
        "banned_ids": np.array([i for ids in banned for i in ids], "<i4").tobytes(),
        "banned_lengths": np.array([len(ids) for ids in banned], "<i4").tobytes(),
    }
