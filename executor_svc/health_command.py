"""`paged-executor-health`: whether an executor serves, for what starts and restarts containers.

Its metrics are asked, since they are there once the model is. One that computes nothing any more ends itself
(--step-timeout-s), so that it answers is all there is to know.
"""

import argparse
import sys
import urllib.request
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if it serves, and 1 if not; bad flags exit with 2."""
    parser = argparse.ArgumentParser(prog="paged-executor-health", description="Ask whether an executor serves.")
    parser.add_argument("--metrics-address", default="127.0.0.1:9101", help="HOST:PORT where its metrics are read.")
    parser.add_argument("--timeout-s", type=float, default=3.0, help="Seconds for the answer.")
    flags = parser.parse_args(arguments)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the environment may name a proxy
    try:
        with direct.open(f"http://{flags.metrics_address}/metrics", timeout=flags.timeout_s):
            return 0
    except (OSError, ValueError) as error:  # URLError is an OSError
        print(f"{flags.metrics_address}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
