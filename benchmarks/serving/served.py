"""Paged itself: an executor and a scheduler as processes of their own, asked over gRPC from here."""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving.workloads import NUM_REQUESTS, REST_S, Request, Workload
from paged.cli.processes import Service, serving, while_alive, written
from paged.client import Client

READY_S, SERVING_S, ANSWERS_S = 600.0, 60.0, 900.0


@dataclass(frozen=True, slots=True)
class Run:
    """What an engine took for a workload. `start_s` is the time until it could be asked, `cpu_s` who was busy."""

    tokens: int
    seconds: float
    start_s: float
    cpu_s: dict[str, float]

    @property
    def tokens_s(self) -> float:
        return self.tokens / self.seconds


async def run_paged(workload: Workload, model: Path, flags: list[str]) -> Run:
    """Starts both services, warms them up, and times the workload. Raises ServiceFailed where one does not last, and
    PagedClientError. `flags` go to the executor."""
    began = time.perf_counter()
    async with _services(model, flags) as (address, services):
        start_s = time.perf_counter() - began
        async with Client(address) as client:
            work = _timed(client, workload, services)
            seconds, cpu_s = await while_alive(work, *services)
    return Run(workload.tokens_out, seconds, start_s, cpu_s)


@asynccontextmanager
async def _services(model: Path, flags: list[str]) -> AsyncIterator[tuple[str, list[Service]]]:
    services: list[Service] = []
    with tempfile.TemporaryDirectory(prefix="paged-throughput-") as name:
        directory = Path(name)
        endpoint_file, address_file = directory / "endpoint", directory / "address"
        try:
            services.append(
                await Service.start(
                    "executor_svc",
                    [
                        *("--model", str(model), "--max-rows", str(NUM_REQUESTS)),
                        *("--endpoint", "tcp://127.0.0.1:0", "--endpoint-file", str(endpoint_file), *flags),
                    ],
                    directory / "executor.log",
                )
            )
            endpoint = await while_alive(written(endpoint_file, READY_S), *services)
            services.append(
                await Service.start(
                    "scheduler_svc",
                    [
                        *("--listen-address", "127.0.0.1:0", "--address-file", str(address_file)),
                        *("--executor-endpoint", endpoint),
                    ],
                    directory / "scheduler.log",
                )
            )
            yield await while_alive(serving(address_file, SERVING_S), *services), services
        finally:
            for service in reversed(services):
                await service.stop()


async def _timed(client: Client, workload: Workload, services: list[Service]) -> tuple[float, dict[str, float]]:
    """Seconds from the first request's leaving to the last answer's end, and each process's seconds of CPU in them."""
    await _ask(client, workload.warm_up[:1], workload)
    await _ask(client, workload.warm_up[1:], workload)
    await asyncio.sleep(REST_S)
    before = _cpu_s(services)
    began = time.perf_counter()
    await _ask(client, workload.requests, workload)
    seconds = time.perf_counter() - began
    return seconds, {name: after - before[name] for name, after in _cpu_s(services).items()}


async def _ask(client: Client, requests: list[Request], workload: Workload) -> None:
    async def answer(request: Request) -> None:
        whole = await client.complete(
            request.prompt,
            max_tokens=request.max_tokens,
            temperature=0,
            ignore_eos=True,
            prefix_cache_bypass=not workload.prefix,
            timeout_s=ANSWERS_S,
        )
        if len(whole.token_ids) != request.max_tokens:
            raise RuntimeError(f"{len(whole.token_ids)} tokens came where {request.max_tokens} were asked for")

    await asyncio.gather(*map(answer, requests))


def _cpu_s(services: list[Service]) -> dict[str, float]:
    client = time.process_time()
    return {"client": client} | {service.module: process_cpu_s(service.pid) for service in services}


def process_cpu_s(pid: int) -> float:
    """User and system time of a process (Linux), 0 elsewhere."""
    if sys.platform != "linux":
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
