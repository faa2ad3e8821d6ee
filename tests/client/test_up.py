"""`paged up` as a user runs it: both services on one machine, an executor that comes back, nothing left behind."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from paged.cli.restarts import Restarts
from paged.client import Client, UnavailableError
from tests.processes import descendants, free_port
from tests.system.requests import Call, answer, ready

END_S = 40.0
GONE_S = 10.0
SLOW = {"PAGED_EXECUTOR_SIMULATE_FIXED_US": "5000", "PAGED_SCHEDULER_SHUTDOWN_GRACE_S": "2"}
IDLE_MOMENTS = ["idle", "load"]
CALL = Call([300, 301, 302], 150, 0.0, 0, "")


class Up:
    """A `paged up --simulate` under way."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address

    async def line_with(self, text: str) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(END_S):
            while line := (await self.process.stdout.readline()).decode():
                if text in line:
                    return line
        raise AssertionError(f"it ended without {text!r}")

    async def code(self) -> int:
        await asyncio.wait_for(self.process.communicate(), END_S)
        assert self.process.returncode is not None
        return self.process.returncode

    def services(self) -> dict[str, int]:
        """Those that run, by module."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                words = entry.read_bytes().split(b"\0")
                # The scheduler is told the address, the executor is told nothing of its own: by their parent, then.
                if len(words) > 2 and words[2] in (b"executor_svc", b"scheduler_svc") and self._is_child(entry.parent):
                    found[words[2].decode()] = int(entry.parent.name)
        return found

    def _is_child(self, place: Path) -> bool:
        status = (place / "status").read_text()
        return f"PPid:\t{self.process.pid}\n" in status and "State:\tZ" not in status


@contextlib.asynccontextmanager
async def up(
    directory: Path, *flags: str, address: str = "", launcher: Sequence[str] = (), **environment: str
) -> AsyncIterator[Up]:
    address = address or f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(
        *(*launcher, sys.executable, "-m", "paged.cli", "up", "--simulate", "--address", address, *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=(directory / "log").open("ab"),
        env={**os.environ, "TMPDIR": str(directory), "PYTHONUNBUFFERED": "1", **SLOW, **environment},
    )
    try:
        yield Up(process, address)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_an_executor_that_dies_is_started_again_and_the_stream_goes_on(tmp_path: Path) -> None:
    async with up(tmp_path) as running, Client(running.address) as client:
        await running.line_with("Serving at")
        assert list(tmp_path.iterdir()) == [tmp_path / "log"], "no file is left where both are ready"
        await ready(client)
        asked = asyncio.create_task(answer(client, CALL))
        while not (await client.load()).running_sequences:
            await asyncio.sleep(0.01)
        os.kill(running.services()["executor_svc"], signal.SIGKILL)
        await running.line_with("ended with code -9; it is started again")
        assert await asked == CALL.expected()
        assert (await client.load()).executor_losses == 1
        running.process.terminate()
        assert await running.code() == 0
        assert running.services() == {}


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
async def test_a_signal_lets_what_runs_end_and_a_second_one_ends_all_at_once(
    tmp_path: Path, number: signal.Signals
) -> None:
    async with up(tmp_path, PAGED_SCHEDULER_SHUTDOWN_GRACE_S="30") as running, Client(running.address) as client:
        await running.line_with("Serving at")
        await ready(client)
        short = asyncio.create_task(answer(client, CALL))
        long = asyncio.create_task(client.complete([7], max_tokens=4000, ignore_eos=True))
        while (await client.load()).running_sequences < 2:
            await asyncio.sleep(0.01)
        running.process.send_signal(number)
        assert await short == CALL.expected()
        assert not long.done()
        running.process.send_signal(number)
        await running.code()
        with pytest.raises(UnavailableError):
            await long
        assert running.services() == {}


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
@pytest.mark.parametrize(
    "moment", ["decode", *(pytest.param(moment, marks=pytest.mark.slow) for moment in IDLE_MOMENTS)]
)
async def test_c7_2_a_killed_launcher_leaves_no_process_and_its_address_is_free(tmp_path: Path, moment: str) -> None:
    """However long its services would give their calls if they were told to stop."""
    grace = {"PAGED_SCHEDULER_SHUTDOWN_GRACE_S": "600", "PAGED_EXECUTOR_SHUTDOWN_GRACE_S": "600"}
    async with up(tmp_path, **grace) as running, Client(running.address) as client:
        asked = None
        if moment == "load":
            while not running.services():
                await asyncio.sleep(0.001)
        else:
            await running.line_with("Serving at")
            await ready(client)
        if moment == "decode":
            asked = asyncio.create_task(client.complete([7], max_tokens=4000, ignore_eos=True))
            while not (await client.load()).running_sequences:
                await asyncio.sleep(0.01)
        pids = list(running.services().values())
        assert len(pids) == (1 if moment == "load" else 2)
        running.process.kill()
        async with asyncio.timeout(GONE_S):
            while any(Path(f"/proc/{pid}").exists() for pid in pids):
                await asyncio.sleep(0.02)
        if asked is not None:
            with pytest.raises(UnavailableError):
                await asked
    async with up(tmp_path, address=running.address) as again, Client(again.address) as client:
        await again.line_with("Serving at")
        await ready(client)
        assert await answer(client, CALL) == CALL.expected()


@pytest.mark.slow
async def test_c7_2_a_killed_scheduler_ends_all_with_what_it_was(tmp_path: Path) -> None:
    async with up(tmp_path) as running:
        await running.line_with("Serving at")
        os.kill(running.services()["scheduler_svc"], signal.SIGKILL)
        assert await running.code() == 1
        assert running.services() == {}
    assert "scheduler_svc ended with code -9" in (tmp_path / "log").read_text()


NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc"]


@pytest.mark.skipif(
    sys.platform != "linux" or subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode != 0,
    reason="takes a process namespace, which Linux gives to root",
)
async def test_as_the_first_process_of_a_container_it_serves_and_takes_all_with_it(tmp_path: Path) -> None:
    async with up(tmp_path, launcher=NAMESPACE) as running, Client(running.address) as client:
        await running.line_with("Serving at")
        await ready(client)
        assert await answer(client, CALL) == CALL.expected()
        outside = running.process.pid
        (first,) = map(int, Path(f"/proc/{outside}/task/{outside}/children").read_text().split())
        services = descendants(first)
        assert len(services) == 2
        os.kill(first, signal.SIGKILL)
        await running.code()
        assert not any(Path(f"/proc/{pid}").exists() for pid in services)


async def test_for_scripts_it_says_whom_to_call_and_nothing_else(tmp_path: Path) -> None:
    async with up(tmp_path, "--json") as machine:
        told = json.loads(await machine.line_with("address"))
        assert told["address"] == machine.address
        assert told["executor"].startswith("tcp://127.0.0.1:")
        machine.process.send_signal(signal.SIGTERM)
        out, _ = await asyncio.wait_for(machine.process.communicate(), END_S)
    assert (machine.process.returncode, out) == (0, b"")


async def test_an_executor_that_cannot_start_is_not_started_again(tmp_path: Path) -> None:
    async with up(tmp_path, PAGED_EXECUTOR_SIMULATE_EOS_ID="999999") as running:
        assert await running.code() == 1
    log = (tmp_path / "log").read_text()
    assert log.count("simulate_eos_id 999999") == 1
    assert "executor_svc ended with code 2" in log


def test_pauses_double_up_to_a_limit_and_begin_anew_for_what_ran_for_long() -> None:
    restarts = Restarts(first_pause_s=0.1, longest_pause_s=0.5, settled_s=30, most=100, window_s=1)
    assert [restarts.pause_s(now, 1.0) for now in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    assert [restarts.pause_s(100, 31.0), restarts.pause_s(101, 1.0)] == [0.1, 0.2]


def test_after_so_many_ends_within_a_time_there_is_no_other_start() -> None:
    restarts = Restarts(most=3, window_s=10)
    assert [restarts.pause_s(now, 1.0) is None for now in (0, 8, 11, 12, 30, 31)] == [False] * 3 + [True, False, False]
