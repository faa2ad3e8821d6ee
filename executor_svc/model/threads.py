"""How many threads a step gets on a CPU.

Torch takes all cores that the process may run on. It does not know that a container may use less of them in all: with
more threads than that, each step waits for those that the kernel holds back.
"""

import math
import os
from pathlib import Path

import structlog
import torch

from executor_svc.model.control_groups import own_groups

log = structlog.get_logger(__name__)


def set_threads(wanted: int | None, num_processes: int = 1) -> None:
    """Call before the first operation. None takes what torch takes (OMP_NUM_THREADS, or all cores), and no more than
    the process's control group may use, shared out over `num_processes` like this one."""
    if wanted is None:
        limit = cores_of_group()
        if limit is None or limit / num_processes >= torch.get_num_threads():
            return
        wanted = max(1, math.floor(limit / num_processes))
        log.info("threads_limited", threads=wanted, cores=os.cpu_count(), reason="the control group's share of CPU")
    torch.set_num_threads(wanted)


def cores_of_group() -> float | None:
    """Cores' worth of time that the process's control group, and those that it is in, may use; None where nothing
    limits it (Linux alone)."""
    limits = [limit for group in own_groups("cpu") if (limit := _limit(group)) is not None]
    return min(limits, default=None)


def _limit(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            files = (group / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
            quota, period = (file.read_text().strip() for file in files)
        except OSError:
            return None
    try:
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max"
        return None
    return cores if cores > 0 else None  # -1: no limit
