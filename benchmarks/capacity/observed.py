"""Real schedulers over a simulated executor: what a load on them came to, and what they used for it."""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from benchmarks.capacity.costs import Work
from benchmarks.capacity.latency import StepLatency
from benchmarks.capacity.readers import Load, Seen
from paged.cli.processes import Service, serving, while_alive, written

READY_S, LATE_S = 60.0, 30.0
LINE_BYTES = 1 << 28
BLOCK_SIZE = 16


class ObservationFailed(Exception):
    """Readers or requests failed."""


@dataclass(frozen=True, slots=True)
class Room:
    """What an executor lends, to all of its schedulers together."""

    max_rows: int = 256
    num_blocks: int = 16384
    tokens_per_step: int = 1024

    def flags(self) -> list[str]:
        return [
            *("--max-rows", str(self.max_rows), "--num-blocks", str(self.num_blocks + 1)),
            *("--tokens-per-step", str(self.tokens_per_step), "--block-size", str(BLOCK_SIZE)),
        ]


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds of CPU: of the thread of the event loop, of the process; and bytes of memory."""

    loop_s: float
    process_s: float
    bytes: int

    @classmethod
    def of(cls, pid: int) -> Self:
        """Of a process until now (Linux)."""
        process = Path(f"/proc/{pid}")
        resident = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return cls(_cpu_s(process / "task" / str(pid) / "stat"), _cpu_s(process / "stat"), resident)


@dataclass(frozen=True, slots=True)
class Observed:
    """A window: what clients saw, what all schedulers did and used together, and the executor's share of a core."""

    seen: Seen
    work: Work
    loop_s: float
    process_s: float
    scheduler_bytes: int  # at its end
    executor_cpu_s: float


@dataclass(frozen=True, slots=True)
class System:
    """A simulated executor and its schedulers."""

    executor: Service
    schedulers: list[Service]
    addresses: list[str]

    @classmethod
    @asynccontextmanager
    async def started(
        cls,
        latency: StepLatency,
        room: Room,
        num_schedulers: int = 1,
        scheduler_flags: Sequence[str] = (),
        executor_flags: Sequence[str] = (),
    ) -> AsyncIterator[Self]:
        """Raises ServiceFailed where a service does not start."""
        services: list[Service] = []
        with tempfile.TemporaryDirectory(prefix="paged-capacity-") as name:
            directory = Path(name)
            try:
                file = directory / "endpoint"
                where = ["--endpoint", "tcp://127.0.0.1:0", "--endpoint-file", str(file)]
                flags = ["--simulate", *where, *room.flags(), *latency.flags(), *executor_flags]
                services.append(await Service.start("executor_svc", flags, directory / "executor.log"))
                endpoint = await while_alive(written(file, READY_S), *services)
                addresses = []
                for number in range(num_schedulers):
                    file = directory / f"address{number}"
                    where = ["--listen-address", "127.0.0.1:0", "--address-file", str(file)]
                    flags = [*where, "--executor-endpoint", endpoint, "--cache-dir", str(directory), *scheduler_flags]
                    services.append(await Service.start("scheduler_svc", flags, directory / f"scheduler{number}.log"))
                    addresses.append(await while_alive(serving(file, READY_S), *services))
                yield cls(services[0], services[1:], addresses)
            finally:
                for service in reversed(services):
                    await service.stop()

    def usages(self) -> list[Usage]:
        return [Usage.of(scheduler.pid) for scheduler in self.schedulers]

    async def observe(
        self, rate: float, lengths: list[tuple[int, int]], settle_s: float, seconds: float, seed: int = 0
    ) -> Observed:
        """Raises ObservationFailed and ServiceFailed."""
        load = Load(self.addresses, rate, lengths, settle_s, seconds, seed)
        return await while_alive(self._observe(load), self.executor, *self.schedulers)

    async def _observe(self, load: Load) -> Observed:
        readers = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.capacity.readers"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
        )
        try:
            assert readers.stdin is not None
            assert readers.stdout is not None
            readers.stdin.write(json.dumps(asdict(load)).encode())
            readers.stdin.write_eof()
            begin = await asyncio.wait_for(readers.stdout.readline(), load.settle_s + LATE_S)
            if begin != b"begin\n":
                raise ObservationFailed(f"readers ended with code {await readers.wait()} before their window began")
            before, executor = self.usages(), Usage.of(self.executor.pid)
            told = await asyncio.wait_for(readers.stdout.readline(), load.seconds + LATE_S)
            after = self.usages()
            executor_cpu_s = Usage.of(self.executor.pid).process_s - executor.process_s
        finally:
            if readers.returncode is None:
                readers.kill()
            await readers.wait()
        if not told:
            raise ObservationFailed(f"readers ended with code {readers.returncode} within their window")
        seen = Seen(**json.loads(told))
        if seen.failed:
            raise ObservationFailed(
                f"{len(seen.failed)} of {seen.requests} requests failed: {sorted(set(seen.failed))}"
            )
        return Observed(
            seen,
            self._work(seen),
            sum(usage.loop_s for usage in after) - sum(usage.loop_s for usage in before),
            sum(usage.process_s for usage in after) - sum(usage.process_s for usage in before),
            sum(usage.bytes for usage in after),
            executor_cpu_s,
        )

    def _work(self, seen: Seen) -> Work:
        # A stream gets a token in every step while it decodes, and loads are such that some stream always does.
        steps_s = seen.stream_tokens / seen.stream_s if seen.stream_s else 0.0
        steps = steps_s * seen.seconds * len(self.schedulers)
        return Work(seen.requests, seen.prompt_tokens, steps, seen.messages, seen.tokens)


def _cpu_s(stat: Path) -> float:
    """User and system time."""
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
