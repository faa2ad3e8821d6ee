"""A control group of Linux with a limit of memory: what a container has, or a service of systemd."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import Service, wait_for

_ROOT = Path("/sys/fs/cgroup")


class MemoryGroup:
    """Processes that are put into it have so many bytes together. Of either version."""

    def __init__(self, place: Path, limit: str, kills: str) -> None:
        self.place = place
        self.limit = limit
        self._kills = kills

    def take(self, service: Service) -> Service:
        (self.place / "cgroup.procs").write_text(str(service.process.pid))
        return service

    @property
    def num_killed(self) -> int:
        """Processes that the kernel has ended since there was no memory left."""
        counts = dict(line.split() for line in (self.place / self._kills).read_text().splitlines())
        return int(counts["oom_kill"])


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """The test is skipped where none can be made: it takes root, and a system that lets it."""
    name = f"paged-test-{os.getpid()}"
    groups = [
        MemoryGroup(_ROOT / name, "memory.max", "memory.events"),
        MemoryGroup(_ROOT / "memory" / name, "memory.limit_in_bytes", "memory.oom_control"),
    ]
    for group in groups:
        with contextlib.suppress(OSError):
            group.place.mkdir()
            try:
                if (group.place / "cgroup.procs").exists():  # the kernel has made it, so this is no plain directory
                    (group.place / group.limit).write_text(str(limit_bytes))
                    break
            except OSError:
                pass
            group.place.rmdir()
    else:
        pytest.skip("no control group with a limit of memory can be made here")
    try:
        yield group
    finally:
        wait_for(lambda: not (group.place / "cgroup.procs").read_text(), "the processes of the group to end")
        group.place.rmdir()
