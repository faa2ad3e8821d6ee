"""How much memory may still be taken, without being killed for it."""

from pathlib import Path

import torch

from executor_svc.model.control_groups import own_groups


def available_bytes(device: torch.device) -> int:
    """On a CPU the least of what the kernel calls available and what this process's control groups have left; on a GPU
    what nobody has, whichever process it is."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min([_machine(), *_left_of_groups()])


def outside_share(device: torch.device, memory_share: float) -> int:
    """Bytes of a GPU that are to stay free when all processes together hold `memory_share` of it; 0 on a CPU."""
    return round((1 - memory_share) * torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else 0


def _machine() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable; set num_blocks or kv_memory")


def _left_of_groups() -> list[int]:
    """Of each of the process's control groups that has a limit. Pages of files that are not in use are given back
    under pressure, so they count as free."""
    files = [
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ]
    found = [_left(group, *names) for group in own_groups("memory") for names in files]
    return [left for left in found if left is not None]


def _left(group: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    try:
        most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None  # not of this version, or without a limit
    if most == "max":
        return None
    return max(0, int(most) - used + int(stat.get(reclaimable, 0)))
