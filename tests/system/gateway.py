"""The ready-made gateway as a process before schedulers, and the official client of OpenAI's API before it."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from openai import AsyncOpenAI

from tests.processes import free_port

START_TIMEOUT_S = 60.0


class Gateway:
    """`smg`, unchanged, told of schedulers of one model by their addresses."""

    def __init__(self, log_file: Path, model: str, schedulers: Iterable[str], *flags: str) -> None:
        self._model = model
        self.port = free_port()
        self.log_file = log_file
        workers = [f"grpc://{address}" for address in schedulers]
        where = ["--host", "127.0.0.1", "--port", str(self.port), "--worker-urls", *workers]
        metrics = ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        program = Path(sys.executable).with_name("smg")
        with log_file.open("ab") as log:
            self.process = subprocess.Popen([program, "launch", *where, *metrics, *flags], stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def wait_until_ready(self) -> "Gateway":
        """Until it can make ids of a text, which it learns last."""
        end = time.monotonic() + START_TIMEOUT_S
        while not self._completes():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < end, self.log
            time.sleep(0.05)
        return self

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)

    def _completes(self) -> bool:
        body = json.dumps({"model": self._model, "prompt": "x", "max_tokens": 1}).encode()
        where = f"http://127.0.0.1:{self.port}/v1/completions"
        request = urllib.request.Request(where, body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=5) as response:
                return response.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):  # an answer like 503 is one of these, too
            return False


@contextmanager
def gateway_before(log_file: Path, model: str, schedulers: Iterable[str], *flags: str) -> Iterator[Gateway]:
    """Gone afterwards."""
    gateway = Gateway(log_file, model, schedulers, *flags)
    try:
        yield gateway.wait_until_ready()
    finally:
        gateway.stop()
