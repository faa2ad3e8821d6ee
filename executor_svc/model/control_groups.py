"""The control groups of Linux that this process is in: what is said in their files limits it."""

from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")  # "hierarchy:controllers:group" a line; version 2 has no controllers


def own_groups(controller: str) -> list[Path]:
    """Directories of the process's group and of all that it is in, of version 2 and of version 1's `controller`.

    Files of either version may be in them, or none; some may not be there.
    """
    try:
        lines = [line.split(":", 2) for line in _OWN.read_text().splitlines()]
    except OSError:  # another system
        lines = []
    own = [Path(group) for _, names, group in lines if names == "" or controller in names.split(",")]
    # A container may see its own group as the root, and be told the name that it has outside.
    groups = {Path("/"), *own, *(outer for group in own for outer in group.parents)}
    places = sorted(group.relative_to("/") for group in groups)
    return [root / place for root in (_ROOT, _ROOT / controller) for place in places]
