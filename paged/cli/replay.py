"""`paged replay`: an executor's recording is run again."""

import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec


def run_replay(arguments: Sequence[str]) -> int:
    """In a process of its own, which alone needs what executors need. Returns its exit code."""
    if find_spec("executor_svc") is None or find_spec("structlog") is None:
        needed = "pip install 'paged-inference[simulated]', or [executor] for a real model"
        print(f"paged: replay needs an executor; run: {needed}", file=sys.stderr)
        return 1
    return subprocess.run([sys.executable, "-m", "executor_svc.replay", *arguments], check=False).returncode
