"""A real Prometheus reads both services, and every panel of the dashboard finds numbers in it."""

import asyncio
import contextlib
import itertools
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
from paged.v1.inference_pb2 import BeamSearch
from tests.docs.pages import blocks
from tests.processes import start_scheduler, wait_for
from tests.system.conftest import System
from tests.system.requests import answer, mixed_calls, ready
from tests.system.test_metrics import ANY_PORT, DEPLOY, expressions, metrics_address

VARIABLES = {"$model": ".*", "$executor": ".*", "$__rate_interval": "10s"}
MAY_BE_ZERO = ("paged_unplaced_sequences", "paged_executor_losses_total")  # all is well here
MOST_S = 120

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus is installed"),
]


@contextlib.contextmanager
def prometheus(directory: Path, targets: dict[str, list[str]]) -> Iterator[str]:
    """Reads each job's addresses every second; gives the URL of its API."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    jobs = [{"job_name": job, "static_configs": [{"targets": addresses}]} for job, addresses in targets.items()]
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


def is_up(url: str, count: int) -> bool:
    with contextlib.suppress(OSError):
        return len(asked(url, "query", query="up == 1")["result"]) == count
    return False


def has_numbers(url: str, expression: str) -> bool:
    """Above zero, but where that would be a fault."""
    for variable, text in VARIABLES.items():
        expression = expression.replace(variable, text)
    found = [float(series["value"][1]) for series in asked(url, "query", query=expression)["result"]]
    least = -1.0 if any(name in expression for name in MAY_BE_ZERO) else 0.0
    return any(math.isfinite(value) and value > least for value in found)


async def much_is_asked(client: Client, rng: random.Random) -> None:
    """More than there are blocks for, of which some is shared."""
    text = rng.randbytes(20).hex()
    await asyncio.gather(
        client.complete_samples(text, n=4, max_tokens=40),
        client.complete_samples(text, beam=BeamSearch(width=4), max_tokens=40),
        *(answer(client, call) for call in mixed_calls(40, rng)),
    )


async def test_every_panel_finds_numbers(system: System, tmp_path: Path) -> None:
    """Two schedulers share the executor, so that blocks change hands."""
    system.executor_flags = ["--num-blocks", "128", "--max-rows", "24", "--simulate-fixed-us", "2000", *ANY_PORT]
    system.scheduler_flags = ANY_PORT
    system.start()
    other = start_scheduler(tmp_path, system.executor_endpoint, *ANY_PORT, name="other")
    system.services.append(other.wait_until_ready())
    targets = {
        "paged-scheduler": [metrics_address(system.scheduler), metrics_address(other)],
        "paged-executor": [metrics_address(system.executor)],
    }
    board = json.loads((DEPLOY / "grafana" / "dashboards" / "paged.json").read_text())
    with prometheus(tmp_path, targets) as url:
        await asyncio.to_thread(wait_for, lambda: is_up(url, 3), "all to be read")
        rng, without = random.Random(3), set(expressions(board))
        async with Client(system.address) as one, Client(other.address) as two, asyncio.timeout(MOST_S):
            await asyncio.gather(ready(one), ready(two))
            for client in itertools.cycle((one, two)):
                await much_is_asked(client, rng)
                without -= {found for found in without if await asyncio.to_thread(has_numbers, url, found)}
                if not without:
                    break
        variables = [variable["query"]["query"] for variable in board["templating"]["list"]]
        assert sorted(variables) == [f"label_values(paged_executor_attached, {of})" for of in ("executor", "model")]
        for label in ("executor", "model"):
            assert len(asked(url, f"label/{label}/values", **{"match[]": "paged_executor_attached"})) == 1


def test_configurations_are_such_that_prometheus_takes_them(tmp_path: Path) -> None:
    (example,) = [block.text for block in blocks("docs/operations.md") if block.language == "yaml"]
    (tmp_path / "example.yml").write_text(example)
    for file in (DEPLOY / "prometheus" / "prometheus.yml", tmp_path / "example.yml"):
        checked = subprocess.run(
            ["promtool", "check", "config", str(file)], capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr
