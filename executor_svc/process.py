"""What the executor has to do with the operating system: signals, its parent, the file that tells its endpoint."""

import ctypes
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
_NEVER = 2**31 - 1
_WAITING = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
_LOOKS = "4000"  # 100 us or 200, as the workers of our own kernels


class Stopper:
    """Becomes `requested` at the first SIGTERM or SIGINT. A second one ends the process at once."""

    def __init__(self) -> None:
        self.requested = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        for again in (signal.SIGTERM, signal.SIGINT):
            # The kernel's own action works even while the process sits in a long native call.
            signal.signal(again, signal.SIG_DFL)


class FollowerSignals:
    """SIGTERM and SIGINT in a process that ends when another one says so, and may wait for that in native code.

    Until `following` is set they end it at once. Then the first one is only to be expected, for whoever sends it sends
    the other process one too; it ends this one after `grace_s`. A second one does so at once.
    """

    def __init__(self, grace_s: float) -> None:
        """Before other threads are started: they inherit that signals are not theirs."""
        self.following = False
        self._grace_s = grace_s
        signals = {signal.SIGTERM, signal.SIGINT}
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        threading.Thread(target=self._watch, args=(signals,), name="signals", daemon=True).start()

    def _watch(self, signals: set[signal.Signals]) -> None:
        number = signal.sigwait(signals)
        if self.following:
            signal.sigtimedwait(signals, self._grace_s)
        leave_at_once(128 + number)


def leave_at_once(code: int) -> NoReturn:
    """Without the farewells of libraries, some of which wait for processes that are gone."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def leave_after(last_words: Callable[[], object], code: int, within_s: float) -> NoReturn:
    """End the process when `last_words` have been said, or after `within_s`.

    They may wait for just what the process has come to grief over: a disk, whoever reads the log, a lock that a thread
    which hangs will never give back.
    """
    try:
        speaker = threading.Thread(target=last_words, name="last words", daemon=True)
        speaker.start()
        speaker.join(within_s)
    finally:
        os._exit(code)  # no stream is flushed: its lock may be held


def die_with_parent(*, may_be_first: bool = False) -> None:
    """Ask Linux to kill this process when the thread that started it ends. Exits where that has happened already.

    The kernel follows the starting thread, not its process: start executors from a thread that lives on. A parent that
    is the system's or the container's first process has adopted this one, unless it `may_be_first`.
    """
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed; run without --exit-with-parent")
    if os.getppid() != parent or (parent == 1 and not may_be_first):
        sys.exit(1)


def let_threads_sleep() -> None:
    """To be called before torch is imported: its OpenMP threads then sleep soon after they have nothing to do, unless
    the environment says how they wait.

    By themselves they keep their cores for some milliseconds more. Beside a busy process each uses up its share of a
    core in waiting for the others, and has none left when those come to wait for it.
    """
    if not _WAITING.intersection(os.environ):
        os.environ["GOMP_SPINCOUNT"] = _LOOKS


def keep_freed_memory() -> None:
    """From now on what is freed stays with the process, for it to use again. Does nothing where libc is not glibc.

    glibc gives large pieces back to the system, which hands them out anew page by page, zeroed: a step that drew from a
    large vocabulary took longer for that than for its arithmetic. To be called when all that is large and lasts has
    been allocated; what is free by then is given back.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
        libc.mallopt(_M_MMAP_MAX, 0)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader finds either nothing, or what was there, or all of `text`."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
