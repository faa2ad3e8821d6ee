"""The `paged` command line. Needs the extra `cli`."""

import sys
from importlib.util import find_spec


def main() -> None:
    """Entry point of the console script."""
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        needed = "pip install 'paged-inference[cli]'"
        print(f"paged: the command line needs {' and '.join(missing)}; run: {needed}", file=sys.stderr)
        raise SystemExit(1)
    from paged.cli.app import app

    app()
