"""Ends this process when the one that started it ends, so that no launcher's death leaves an orphan."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def exit_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, or the thread of it that started us (Linux; elsewhere
    nothing happens). At once: whoever starts the parent anew needs what this process holds."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)
