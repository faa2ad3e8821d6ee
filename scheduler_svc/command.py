"""The console script, which says what to install where the client's packages are all there is."""

import sys


def main() -> None:
    try:
        from scheduler_svc.__main__ import main as serve
    except ModuleNotFoundError as error:
        needed = "pip install 'paged-inference[scheduler]'"
        print(f"paged-scheduler: {error.name} is missing; run: {needed}", file=sys.stderr)
        raise SystemExit(1) from None
    serve()
