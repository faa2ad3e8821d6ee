"""`paged-gateway-workers`: keeps a file that tells a gateway which schedulers a name in the network stands for.

For gateways that connect once to each URL and so need one for each replica: smg with `--discovery-provider file`.
"""

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

# The addresses of a host name. Raises OSError where it cannot be looked up, or has none.
Resolve = Callable[[str], list[str]]

FILE_MODE = 0o644


def resolve(host: str) -> list[str]:
    """By the system's resolver; IPv6 only where there is no IPv4."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a part between dots is empty, or too long
        raise OSError(f"no name of a host: {error}") from error
    addresses = {
        family: {str(a[4][0]) for a in found if a[0] is family} for family in (socket.AF_INET, socket.AF_INET6)
    }
    return sorted(addresses[socket.AF_INET] or addresses[socket.AF_INET6])


class WorkersFile:
    """The file: made at once, written anew, whole, whenever the name stands for others than before.

    While the name cannot be looked up it stays as it is: the gateway asks each scheduler itself whether it is well.
    """

    def __init__(self, schedulers: str, file: Path, resolve: Resolve = resolve) -> None:
        """`schedulers` is NAME:PORT. Raises ValueError."""
        self._host, colon, port = schedulers.rpartition(":")
        if not (colon and self._host and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise ValueError(f"{schedulers!r} must be NAME:PORT, such as scheduler:50051")
        self._port, self._file, self._resolve = int(port), file, resolve
        self._written: list[str] | None = None
        self._failed = False

    def update(self) -> None:
        """Look the name up, and write what is new. Raises OSError where the file cannot be written."""
        try:
            urls = [f"grpc://{_bracketed(address)}:{self._port}" for address in self._resolve(self._host)]
        except OSError as error:
            self._say_once(error)
            urls = self._written or []
        else:
            self._failed = False
        if urls != self._written:
            _write(self._file, {"version": 1, "workers": [{"url": url} for url in urls]})
            self._written = urls
            print(f"schedulers: {' '.join(urls) or 'none'}", flush=True)

    def _say_once(self, error: OSError) -> None:
        if not self._failed:
            print(f"{self._host} cannot be looked up: {error}", file=sys.stderr, flush=True)
        self._failed = True


def main(arguments: Sequence[str] | None = None) -> int:
    """Until SIGTERM or SIGINT. Returns 1 where the file cannot be written; bad flags exit with 2."""
    parser = argparse.ArgumentParser(
        prog="paged-gateway-workers", description="Keep a file of the schedulers behind a name, for a gateway."
    )
    parser.add_argument("schedulers", help="NAME:PORT")
    parser.add_argument("file", type=Path, help="What smg gets as --discovery-file.")
    parser.add_argument("--period-s", type=float, default=2.0, help="Seconds between look-ups.")
    flags = parser.parse_args(arguments)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    try:
        workers = WorkersFile(flags.schedulers, flags.file)
    except ValueError as error:
        parser.error(str(error))
    try:
        while not stopped.is_set():
            workers.update()
            stopped.wait(flags.period_s)
    except OSError as error:
        print(f"{flags.file} cannot be written: {error}", file=sys.stderr)
        return 1
    return 0


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _write(path: Path, content: object) -> None:
    """At once: who reads it sees the old or the new."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(descriptor, FILE_MODE)
            json.dump(content, file)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


if __name__ == "__main__":
    sys.exit(main())
