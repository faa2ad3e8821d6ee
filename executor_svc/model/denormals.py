"""Denormal numbers are taken for zero: arithmetic with them is a hundred times slower on most CPUs.

Each thread has a setting of its own, which a new one takes over from the one that starts it. So torch's threads, which
are there from its first operation in parallel on, must not be yet.
"""

import structlog
import torch

log = structlog.get_logger(__name__)

_MANY = 1 << 20  # numbers that torch shares out to all its threads


def flush_denormals() -> bool:
    """Call when a process begins. Whether all of torch's threads do so then."""
    if not torch.set_flush_denormal(True):
        return False  # no setting of this kind of CPU
    smallest = torch.ones(_MANY, dtype=torch.int32).view(torch.float32)
    flushed = not bool((smallest * 1.0).view(torch.int32).any())
    if not flushed:
        log.warning("denormals_not_flushed", reason="torch had threads before this process could tell it")
    return flushed
