"""A running system: one simulated executor and one scheduler, as processes on loopback."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.processes import Service, cleaned_up, start_executor, start_scheduler

VOCAB_SIZE = 32000


@dataclass
class System:
    """Starts and restarts its services; a restarted one listens where the old one did."""

    directory: Path
    services: list[Service]
    executor_flags: list[str] = field(default_factory=list)
    scheduler_flags: list[str] = field(default_factory=list)

    def start(self) -> "System":
        self.executor = self._track(start_executor(self.directory, "--simulate", *self.executor_flags))
        self.executor_endpoint = self.executor.wait_until_ready().address
        self.scheduler = self._track(self._new_scheduler("127.0.0.1:0"))
        self.address = self.scheduler.wait_until_ready().address
        return self

    def restart_executor(self, *flags: str) -> None:
        self.executor = self._track(
            start_executor(
                self.directory, "--simulate", *(flags or self.executor_flags), endpoint=self.executor_endpoint
            )
        )

    def restart_scheduler(self) -> None:
        self.scheduler = self._track(self._new_scheduler(self.address))
        self.scheduler.wait_until_ready()

    def _new_scheduler(self, address: str) -> Service:
        return start_scheduler(self.directory, self.executor_endpoint, *self.scheduler_flags, address=address)

    def _track(self, service: Service) -> Service:
        self.services.append(service)
        return service


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    """Not started yet, so that a test can set flags."""
    with cleaned_up([]) as services:
        yield System(tmp_path, services)
