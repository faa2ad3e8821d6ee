"""A real Prometheus reads both services, and every panel of the dashboard finds numbers in it."""

import asyncio
import contextlib
import json
import math
import random
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paged.client import Client
from tests.processes import wait_for
from tests.system.conftest import System
from tests.system.requests import answer, mixed_calls, ready
from tests.system.test_metrics import ANY_PORT, DEPLOY, expressions, metrics_address

VARIABLES = {"$model": ".*", "$executor": ".*", "$__rate_interval": "10s"}
MOST_S = 120

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus is installed"),
]


@contextlib.contextmanager
def prometheus(directory: Path, addresses: dict[str, str]) -> Iterator[str]:
    """Reads each job's address every second; gives the URL of its API."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    jobs = [{"job_name": job, "static_configs": [{"targets": [address]}]} for job, address in addresses.items()]
    config = directory / "prometheus.yml"
    config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}))  # JSON is YAML
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={directory / 'data'}"]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}/api/v1"
    finally:
        process.terminate()
        process.wait(30)


def asked(url: str, path: str, **parameters: str) -> Any:
    with urllib.request.urlopen(f"{url}/{path}?{urllib.parse.urlencode(parameters)}", timeout=10) as response:
        return json.load(response)["data"]


def is_up(url: str) -> bool:
    with contextlib.suppress(OSError):
        return len(asked(url, "query", query="up == 1")["result"]) == 2
    return False


def has_numbers(url: str, expression: str) -> bool:
    for variable, text in VARIABLES.items():
        expression = expression.replace(variable, text)
    found = asked(url, "query", query=expression)["result"]
    return any(math.isfinite(float(series["value"][1])) for series in found)


async def test_every_panel_finds_numbers(system: System, tmp_path: Path) -> None:
    system.executor_flags = ["--num-blocks", "128", "--max-rows", "24", "--simulate-fixed-us", "2000", *ANY_PORT]
    system.scheduler_flags = ANY_PORT
    system.start()
    addresses = {f"paged-{name}": metrics_address(getattr(system, name)) for name in ("scheduler", "executor")}
    board = json.loads((DEPLOY / "grafana" / "dashboards" / "paged.json").read_text())
    with prometheus(tmp_path, addresses) as url:
        await asyncio.to_thread(wait_for, lambda: is_up(url), "both to be read")
        rng, without = random.Random(3), set(expressions(board))
        async with Client(system.address) as client, asyncio.timeout(MOST_S):
            await ready(client)
            while without:
                await asyncio.gather(*(answer(client, call) for call in mixed_calls(40, rng)))
                without -= {one for one in without if await asyncio.to_thread(has_numbers, url, one)}
        variables = [variable["query"]["query"] for variable in board["templating"]["list"]]
        assert sorted(variables) == [f"label_values(paged_executor_attached, {of})" for of in ("executor", "model")]
        for label in ("executor", "model"):
            assert len(asked(url, f"label/{label}/values", **{"match[]": "paged_executor_attached"})) == 1


def test_the_configuration_is_one_that_prometheus_takes() -> None:
    file = DEPLOY / "prometheus" / "prometheus.yml"
    checked = subprocess.run(["promtool", "check", "config", str(file)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
