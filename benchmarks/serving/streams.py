"""Schedulers and simulated executors as processes, and what readers in yet another process see of them."""

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.serving.served import process_cpu_s
from paged.cli.processes import Service, serving, while_alive, written
from paged.client import Client
from paged.load.generator import Load
from paged.load.seen import Seen
from paged.v1 import control_pb2

STEP_US = 10_000
READY_S, WARM_S, ANSWER_S = 60.0, 120.0, 600.0
MAX_MODEL_LEN = 4096
BLOCK_SIZE = 16
PROMPT_TOKENS_PER_STEP = 2048  # beside one for each row
LINE_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Window:
    """What went on between two moments: what readers saw, and what each scheduler says of itself and has used."""

    seen: Seen
    cpu_s: list[float]
    executor_cpu_s: float
    before: list[control_pb2.GetLoadResponse]
    after: list[control_pb2.GetLoadResponse]


@dataclass(frozen=True, slots=True)
class Served:
    """Services that take requests."""

    executor: Service
    schedulers: list[Service]
    addresses: list[str]

    @property
    def target(self) -> str:
        """For gRPC, all schedulers in turn."""
        return "ipv4:" + ",".join(self.addresses)

    @property
    def services(self) -> list[Service]:
        return [self.executor, *self.schedulers]


@asynccontextmanager
async def served(
    num_schedulers: int,
    rows: int,
    *,
    step_us: int = STEP_US,
    tokens_per_row: int = 1024,
    executor_flags: Sequence[str] = (),
) -> AsyncIterator[Served]:
    """Schedulers that share an executor, with rows for so many sequences in all, and blocks for such long ones."""
    services: list[Service] = []
    with tempfile.TemporaryDirectory(prefix="paged-serving-") as name:
        directory = Path(name)
        endpoint_file = directory / "endpoint"
        try:
            flags = [
                *_executor_flags(rows, step_us, tokens_per_row),
                "--endpoint-file",
                str(endpoint_file),
                *executor_flags,
            ]
            services.append(await Service.start("executor_svc", flags, directory / "executor.log"))
            endpoint = await while_alive(written(endpoint_file, READY_S), *services)
            addresses = []
            for number in range(num_schedulers):
                address_file = directory / f"address{number}"
                flags = ["--listen-address", "127.0.0.1:0", "--address-file", str(address_file)]
                flags += ["--executor-endpoint", endpoint, "--cache-dir", str(directory / "tokenizers")]
                services.append(await Service.start("scheduler_svc", flags, directory / f"scheduler{number}.log"))
                addresses.append(await while_alive(serving(address_file, READY_S), *services))
            yield Served(services[0], services[1:], addresses)
        finally:
            for service in reversed(services):
                await service.stop()


def _executor_flags(rows: int, step_us: int, tokens_per_row: int) -> list[str]:
    # Nobody is preempted: scheduling is measured elsewhere.
    return [
        *("--simulate", "--simulate-fixed-us", str(step_us), "--simulate-max-model-len", str(MAX_MODEL_LEN)),
        *("--max-rows", str(rows), "--tokens-per-step", str(rows + PROMPT_TOKENS_PER_STEP)),
        *("--num-blocks", str(rows * -(-tokens_per_row // BLOCK_SIZE) + 1), "--endpoint", "tcp://127.0.0.1:0"),
    ]


class LoadProcess:
    """A `paged.load.process` in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    @asynccontextmanager
    async def of(cls, load: Load) -> "AsyncIterator[LoadProcess]":
        """The load, warm: every stream has had a token."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "paged.load.process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
        )
        generator = cls(process)
        try:
            generator._tell(json.dumps(asdict(load)))
            await generator._hear(WARM_S)
            yield generator
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self) -> None:
        self._tell("begin")

    async def end(self) -> Seen:
        self._tell("end")
        return Seen(**json.loads(await self._hear(ANSWER_S)))

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")

    async def _hear(self, timeout_s: float) -> str:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
        if not line:
            raise RuntimeError(f"the load generator has ended with code {await self._process.wait()}")
        return line.decode()


async def watch(system: Served, load: Load, settle_s: float, seconds: float) -> Window:
    """What goes on in so many seconds, some time after all streams have begun."""
    async with LoadProcess.of(load) as generator:
        await asyncio.sleep(settle_s)
        clients = [Client(address) for address in system.addresses]
        before = [await client.load() for client in clients]
        cpu_s = [process_cpu_s(service.pid) for service in system.schedulers]
        executor_cpu_s = process_cpu_s(system.executor.pid)
        generator.begin()
        await asyncio.sleep(seconds)
        used_s = [process_cpu_s(s.pid) - began for s, began in zip(system.schedulers, cpu_s, strict=True)]
        executor_cpu_s = process_cpu_s(system.executor.pid) - executor_cpu_s
        after = [await client.load() for client in clients]
        seen = await generator.end()
        for client in clients:
            await client.close()
    return Window(seen, used_s, executor_cpu_s, before, after)
