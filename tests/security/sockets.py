"""What a process listens on, as the kernel says (Linux)."""

import contextlib
import os
from pathlib import Path

from tests.processes import Service

LISTENS = "0A"


def listening(service: Service) -> set[tuple[str, int]]:
    """Hosts, in the kernel's hexadecimal, and ports."""
    inodes = set()
    for descriptor in Path(f"/proc/{service.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            inodes.add(os.readlink(descriptor))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in inodes:
                host, port = fields[1].split(":")
                found.add((host, int(port, 16)))
    return found
