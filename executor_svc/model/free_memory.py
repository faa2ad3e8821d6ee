"""How much memory may still be taken, without being killed for it."""

from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")
_CGROUP_V1 = _CGROUP / "memory"


def available_bytes(device: torch.device) -> int:
    """On a CPU the least of what the kernel calls available and what this process's control group has left; on a GPU
    what nobody has, whichever process it is."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [_machine(), _cgroup_v2(), _cgroup_v1()]
    return min(limit for limit in limits if limit is not None)


def outside_share(device: torch.device, memory_share: float) -> int:
    """Bytes of a GPU that are to stay free when all processes together hold `memory_share` of it; 0 on a CPU."""
    return round((1 - memory_share) * torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else 0


def _machine() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable; set num_blocks or kv_memory")


def _cgroup_v2() -> int | None:
    return _left(_CGROUP / "memory.max", _CGROUP / "memory.current", "inactive_file")


def _cgroup_v1() -> int | None:
    return _left(_CGROUP_V1 / "memory.limit_in_bytes", _CGROUP_V1 / "memory.usage_in_bytes", "total_inactive_file")


def _left(limit: Path, usage: Path, reclaimable: str) -> int | None:
    """Limit minus usage; pages of files that are not in use are given back under pressure, so they count as free."""
    try:
        most, used = limit.read_text().strip(), int(usage.read_text())
        stat = dict(line.split() for line in (limit.parent / "memory.stat").read_text().splitlines())
    except OSError:
        return None  # no control group of this version, or none with a limit
    if most == "max":
        return None
    return max(0, int(most) - used + int(stat.get(reclaimable, 0)))
