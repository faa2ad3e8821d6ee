"""Cases of processes that die, start, stop and have children, each with its right value (C7.1, C7.3, C7.8, C7.9)."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paged.client import Client, Retries, UnavailableError
from tests.processes import START_TIMEOUT_S, cleaned_up, start_executor, start_scheduler, wait_for
from tests.system.conftest import System
from tests.system.requests import Call, answer, idle_load, ready

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SLOW_STEPS = ["--simulate-fixed-us", "5000"]
NOTICED_S = 5.0


@contextlib.asynccontextmanager
async def readiness(address: str) -> AsyncIterator[Any]:
    """Reads the status that a watcher is told of, next by next."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="paged.v1.InferenceService"))

        async def becomes(status: int) -> None:
            async with asyncio.timeout(NOTICED_S if status == NOT_SERVING else START_TIMEOUT_S):
                while (await watch.read()).status != status:
                    pass

        yield becomes
        watch.cancel()


@pytest.mark.parametrize(
    "moment", ["decode", pytest.param("prefill", marks=pytest.mark.slow), pytest.param("idle", marks=pytest.mark.slow)]
)
async def test_c7_1_a_killed_executor_is_noticed_and_all_calls_go_on_exactly_with_the_next(
    system: System, moment: str
) -> None:
    """Three streams and two calls that wait. All are computed anew: what has come stays, nothing is cached."""
    system.executor_flags = ["--num-blocks", "400", "--max-rows", "3", "--tokens-per-step", "16", *SLOW_STEPS]
    system.start()
    prompt_tokens = 600 if moment == "prefill" else 20
    calls = [Call([300 + i] * prompt_tokens, 40, 0.0, 0, "") for i in range(5)]
    async with Client(system.address) as client, readiness(system.address) as becomes:
        await ready(client)
        await becomes(SERVING)
        asked = [asyncio.create_task(answer(client, call)) for call in calls if moment != "idle"]
        async with asyncio.timeout(20):
            while asked and not await at_moment(client, moment):
                await asyncio.sleep(0.01)
        before = await client.load()
        if asked:
            assert before.running_sequences + before.waiting_sequences == 5
            assert before.waiting_sequences >= 2
        system.executor.kill()
        await becomes(NOT_SERVING)
        assert not any(call.done() for call in asked)
        system.restart_executor()
        await becomes(SERVING)
        assert await asyncio.gather(*asked) == [call.expected() for call in calls[: len(asked)]]
        cached = (await client.load()).cached_prompt_tokens
        again = Call([777] * 40, 10, 0.0, 0, "")
        assert await answer(client, again) == again.expected()
        load = await idle_load(client)
    assert load.cached_prompt_tokens == cached, "nothing from before the loss was found"
    assert (load.used_blocks, load.executor_losses, load.failed_requests) == (0, 1, 0)


@pytest.mark.parametrize(
    "waits",
    [
        pytest.param(["--executor-wait-s", "3", "--new-request-wait-s", "0"], id="short"),
        pytest.param([], id="default", marks=pytest.mark.slow),
    ],
)
async def test_c7_1_where_none_comes_back_all_calls_end_in_time_and_new_ones_at_once(
    system: System, waits: list[str]
) -> None:
    """New ones by default wait for what is left of the others' time, and end at once after that."""
    system.executor_flags = ["--max-rows", "3", *SLOW_STEPS]
    system.scheduler_flags = waits
    system.start()
    calls = [Call([300 + i] * 20, 3000, 0.0, 0, "") for i in range(5)]
    async with (
        Client(system.address, retries=Retries(max_attempts=1)) as client,
        readiness(system.address) as becomes,
    ):
        await ready(client)
        await becomes(SERVING)
        asked = [asyncio.create_task(answer(client, call)) for call in calls]
        async with asyncio.timeout(20):
            while not await at_moment(client, "decode"):
                await asyncio.sleep(0.01)
        system.executor.kill()
        await becomes(NOT_SERVING)
        if not waits:
            asked.append(asyncio.create_task(client.complete([300] * 20, max_tokens=4)))
            async with asyncio.timeout(20):
                while (await client.load()).waiting_sequences < 6:
                    await asyncio.sleep(0.01)
            await asyncio.wait(asked, timeout=60)
        with pytest.raises(UnavailableError, match="no executor has been attached"):
            await client.complete([300] * 20, max_tokens=4)
        ends = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(end) for end in ends] == [UnavailableError] * len(asked)
        system.restart_executor()
        await becomes(SERVING)
        again = Call([777] * 40, 10, 0.0, 0, "")
        assert await answer(client, again) == again.expected()
        load = await idle_load(client)
    assert (load.used_blocks, load.waiting_sequences, load.failed_requests) == (0, 0, len(asked))


async def at_moment(client: Client, moment: str) -> bool:
    load = await client.load()
    if load.running_sequences + load.waiting_sequences < 5:
        return False
    if moment == "prefill":
        return load.running_sequences > 0 and load.generated_tokens == 0
    return load.running_sequences == 3 and load.generated_tokens > 20


@pytest.mark.parametrize(
    "state",
    ["frozen", pytest.param("dead", marks=pytest.mark.slow), pytest.param("never there", marks=pytest.mark.slow)],
)
async def test_c7_9_a_scheduler_stops_in_time_whatever_its_executor_does(tmp_path: Path, state: str) -> None:
    call = Call([300, 301, 302], 3000, 0.0, 0, "")
    with cleaned_up([]) as services:
        executor = start_executor(tmp_path, "--simulate", *SLOW_STEPS).wait_until_ready()
        services.append(executor)
        if state == "never there":
            executor.kill()
        scheduler = start_scheduler(tmp_path, executor.address, "--shutdown-grace-s", "1").wait_until_ready()
        services.append(scheduler)
        async with Client(scheduler.address) as client:
            asked = []
            if state != "never there":
                await ready(client)
                asked = [asyncio.create_task(answer(client, call)) for _ in range(20)]
                async with asyncio.timeout(20):
                    while (await client.load()).generated_tokens < 40:
                        await asyncio.sleep(0.01)
                executor.kill() if state == "dead" else executor.freeze()
            scheduler.process.terminate()
            assert await asyncio.to_thread(scheduler.process.wait, 1 + NOTICED_S) == 0
            for ended in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(ended, UnavailableError), repr(ended)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_c7_9_a_signal_while_the_executor_loads_ends_it_at_once(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "executor_svc", "--endpoint", "tcp://127.0.0.1:0", "--model", str(tmp_path)]
    with subprocess.Popen([*command, "--exit-with-parent"], stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: listens(process.pid), "the socket, which is there before the model")
        process.send_signal(number)
        assert process.wait(NOTICED_S) == -number


def listens(pid: int) -> bool:
    return bool(listening(pid))


def listening(pid: int) -> set[str]:
    """Inodes of the TCP sockets that the process listens with."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                inodes.add(fields[9])
    return {inode for inode in inodes if f"socket:[{inode}]" in descriptors(pid)}


def descriptors(pid: int) -> set[str]:
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(entry))
    return found


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@pytest.mark.parametrize(
    ("rounds", "fork_support"),
    [(5, "1"), *(pytest.param(100, support, marks=pytest.mark.slow) for support in ("0", "1"))],
)
async def test_c7_8_a_child_of_a_serving_scheduler_has_none_of_its_sockets_and_dies_with_it(
    system: System, monkeypatch: pytest.MonkeyPatch, rounds: int, fork_support: str
) -> None:
    """The worker that tries grammars is the only one. It is started anew again and again while calls are served,
    whether or not gRPC's handlers of a fork are asked for."""
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", fork_support)
    system.start()
    pid = system.scheduler.process.pid
    plain = Call([300, 301], 2000, 0.0, 0, "")
    async with Client(system.address) as client:
        await ready(client)
        beside = asyncio.create_task(answer(client, plain))
        for i in range(rounds):
            assert (await client.complete([65 + i % 20], regex=f"[ab]{{{i + 1}}}", max_tokens=2)).token_ids
            (worker,) = children(pid)
            own = listening(pid)
            assert own
            shared = descriptors(pid) & descriptors(worker)
            assert not {name for name in shared if name.startswith("socket:")}
            assert Path(f"/proc/{worker}/cmdline").read_bytes().split(b"\0")[2] == b"scheduler_svc.text.grammar_worker"
            os.kill(worker, signal.SIGKILL)
            wait_for(lambda ended=worker: ended not in live(children(pid)), "the end of the worker")
        assert await beside == plain.expected()
        await client.complete([65], regex="[ab]", max_tokens=2)
        (worker,) = live(children(pid))
    os.kill(worker, signal.SIGSTOP)  # as one that is busy does, it sees nothing of its pipe
    system.scheduler.kill()
    wait_for(lambda: not live([worker]), "the end of a worker whose scheduler is gone", 10)


def live(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append(pid)
    return found


@pytest.mark.parametrize(("count", "rounds"), [(3, 1), pytest.param(8, 20, marks=pytest.mark.slow)])
def test_c7_3_those_started_at_once_are_at_endpoints_of_their_own(tmp_path: Path, count: int, rounds: int) -> None:
    for number in range(rounds):
        with cleaned_up([]) as services:
            for i in range(count):
                place = tmp_path / f"{number}-{i}"
                place.mkdir()
                services.append(start_executor(place, "--simulate"))
            assert len({service.wait_until_ready().address for service in services}) == count


def test_c7_3_a_taken_address_is_refused_at_once_by_name(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for module, flags in (
            ("executor_svc", ["--simulate", "--endpoint", f"tcp://{address}"]),
            ("scheduler_svc", ["--listen-address", address]),
        ):
            ended = subprocess.run([sys.executable, "-m", module, *flags], capture_output=True, timeout=30, check=False)
            assert ended.returncode == 1
            assert address in ended.stderr.decode()


@pytest.mark.parametrize("module", ["executor_svc", "scheduler_svc"])
def test_c7_3_an_ipc_path_that_is_too_long_is_refused_at_once_by_name(tmp_path: Path, module: str) -> None:
    path = f"ipc://{tmp_path}/{'x' * 108}"
    flags = {"executor_svc": ["--simulate", "--endpoint"], "scheduler_svc": ["--executor-endpoint"]}[module]
    ended = subprocess.run([sys.executable, "-m", module, *flags, path], capture_output=True, timeout=30, check=False)
    assert ended.returncode in (1, 2)
    assert path in ended.stderr.decode()
    assert list(tmp_path.iterdir()) == []


def test_c7_2_services_that_a_shell_has_started_end_with_it_and_can_be_started_again(tmp_path: Path) -> None:
    """A shell starts both, and is killed. Each is where it was once more, at once."""
    files = {name: tmp_path / name for name in ("executor", "scheduler")}
    endpoint, address = "tcp://127.0.0.1:*", "127.0.0.1:0"
    for _ in range(2):
        executor = f"-m executor_svc --simulate --endpoint {endpoint} --endpoint-file {files['executor']}"
        with shell(f"exec {sys.executable} {executor} --exit-with-parent", tmp_path) as (first, one):
            wait_for(files["executor"].exists, "the executor")
            endpoint = files["executor"].read_text()
            where = f"--listen-address {address} --executor-endpoint {endpoint} --cache-dir {tmp_path}"
            scheduler = f"-m scheduler_svc {where} --address-file {files['scheduler']}"
            with shell(f"exec {sys.executable} {scheduler} --exit-with-parent", tmp_path) as (second, other):
                wait_for(files["scheduler"].exists, "the scheduler")
                address = files["scheduler"].read_text().strip()
                started = [one(), other()]
                for parent in (first, second):
                    parent.kill()
                wait_for(lambda pids=started: not live(pids), "their end", 10)
        for file in files.values():
            file.unlink()


@contextlib.contextmanager
def shell(command: str, directory: Path) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], int]]]:
    """A shell that has started a command in the background and waits; and what gives the command's process id."""
    script = f"({command}) 2>>{directory}/log & wait"
    with subprocess.Popen(["bash", "-c", script]) as parent:
        try:
            yield parent, lambda: children(parent.pid)[0]
        finally:
            parent.kill()
