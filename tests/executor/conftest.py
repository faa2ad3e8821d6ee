"""Real executors with the simulated model, as processes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.executor.client import PlanClient
from tests.processes import Service, start_executor

POOL = ("--num-blocks", "64", "--max-rows", "8", "--tokens-per-step", "32", "--recall-timeout-s", "60")
SIMULATED = ("--simulate", *POOL, "--log-format", "json")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Starts executors with flags of the test's own, waits until they are ready, and kills what is left of them."""
    started: list[Service] = []

    def start_one(*flags: str, endpoint: str = "tcp://127.0.0.1:0") -> Service:
        directory = tmp_path / str(len(started))
        directory.mkdir()
        started.append(start_executor(directory, *SIMULATED, *flags, endpoint=endpoint))
        return started[-1].wait_until_ready()

    yield start_one
    for service in started:
        service.kill()


@pytest.fixture
def executor(start: Callable[..., Service]) -> Service:
    return start()


@pytest.fixture
def client(executor: Service) -> Iterator[PlanClient]:
    """Attached."""
    with PlanClient(executor.address) as client:
        client.attach()
        yield client
