"""How many threads a step gets on a CPU.

Torch takes all cores that the process may run on. It does not know that a container may use less of them in all: with
more threads than that, each step waits for those that the kernel holds back.
"""

import math
import os
from pathlib import Path

import structlog
import torch

log = structlog.get_logger(__name__)

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")  # "hierarchy:controllers:group" a line; version 2 has no controllers


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


def cores_of_group(root: Path = _CGROUPS, own: Path = _OWN) -> float | None:
    """Cores' worth of time that the process's control group, and those that it is in, may use; None where nothing
    limits it (Linux alone)."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        lines = []
    own_groups = [Path(group) for _, names, group in lines if names == "" or "cpu" in names.split(",")]
    # A container may see its own group as the root, and be told the name that it has outside.
    groups = {Path("/"), *own_groups, *(outer for group in own_groups for outer in group.parents)}
    places = {group.relative_to("/") for group in groups}
    limits = [limit for place in places if (limit := _limit(root / place, root / "cpu" / place)) is not None]
    return min(limits, default=None)


def _limit(group: Path, group_of_version_1: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            files = (group_of_version_1 / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
            quota, period = (file.read_text().strip() for file in files)
        except OSError:
            return None
    try:
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max"
        return None
    return cores if cores > 0 else None  # -1: no limit
