"""The console script, which says what to install where the client's packages are all there is."""

import sys


def main() -> int:
    try:
        from executor_svc.__main__ import main as serve
    except ModuleNotFoundError as error:
        needed = "pip install 'paged-inference[executor]', or [simulated] for --simulate alone"
        print(f"paged-executor: {error.name} is missing; run: {needed}", file=sys.stderr)
        return 1
    return serve()
