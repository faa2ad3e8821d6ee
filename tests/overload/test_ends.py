"""However a service ends, no process, port, file of a socket or shared memory of it is left."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paged.client import Client, generate_request
from paged.v1 import inference_pb2
from tests.processes import Service, cleaned_up, descendants, start_executor, start_scheduler, wait_for
from tests.system.requests import ready
from tests.tiny_models import save_tiny

SLOW_STEPS = ["--simulate", "--simulate-fixed-us", "2000"]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def busy(address: str) -> asyncio.Task[None]:
    """Has a grammar compiled, which takes a process of its own, and a stream that goes on."""
    client = Client(address)
    await ready(client)
    constrained = generate_request([300], max_tokens=4)
    constrained.grammar.CopyFrom(inference_pb2.Grammar(regex="[a-c]{1,5}"))
    async for _ in client._messages(constrained, 20):
        pass
    begun = asyncio.Event()

    async def stream() -> None:
        async with client:
            async for _ in client.generate([300], ignore_eos=True, max_tokens=3000):
                begun.set()

    streaming = asyncio.create_task(stream())
    await begun.wait()
    return streaming


async def end(service: Service, how: list[signal.Signals]) -> int:
    first, *others = how
    service.process.send_signal(first)
    for number in others:
        wait_for(lambda: "stopping" in service.log, "it to stop")
        service.process.send_signal(number)
    return await asyncio.to_thread(service.process.wait, 30)


HOW = {
    "told to stop": [signal.SIGTERM],
    "interrupted": [signal.SIGINT],
    "told twice": [signal.SIGTERM, signal.SIGTERM],
    "killed": [signal.SIGKILL],
}
WAYS = ["told to stop", "killed", *(pytest.param(how, marks=pytest.mark.slow) for how in ("interrupted", "told twice"))]


@pytest.mark.parametrize("how", WAYS)
async def test_a_scheduler_leaves_nothing_behind(tmp_path: Path, how: str) -> None:
    with cleaned_up([start_executor(tmp_path, *SLOW_STEPS)]) as services:
        endpoint = services[0].wait_until_ready().address
        scheduler = start_scheduler(tmp_path, endpoint, "--shutdown-grace-s", "0.2")
        services.append(scheduler)
        streaming = await busy(scheduler.wait_until_ready().address)
        children = descendants(scheduler.process.pid)
        assert len(children) == 1, "a worker that compiles grammars"
        assert "/dev/shm" not in Path(f"/proc/{scheduler.process.pid}/maps").read_text()
        code = await end(scheduler, HOW[how])
        assert code == {"told twice": 1, "killed": -signal.SIGKILL}.get(how, 0)
        wait_for(lambda: not any(map(lives, children)), "its children to end", 10)
        host, _, port = scheduler.address.rpartition(":")
        with socket.create_server((host, int(port))):
            pass
        await asyncio.gather(streaming, return_exceptions=True)


@pytest.mark.parametrize("how", WAYS)
async def test_an_executor_leaves_nothing_behind(tmp_path: Path, how: str) -> None:
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    flags = [*SLOW_STEPS, "--shutdown-grace-s", "600" if how == "told twice" else "0.2"]
    with cleaned_up([start_executor(tmp_path, *flags, endpoint=f"ipc://{sockets}/plans")]) as services:
        endpoint = services[0].wait_until_ready().address
        services.append(start_scheduler(tmp_path, endpoint, "--executor-wait-s", "1"))
        streaming = await busy(services[1].wait_until_ready().address)
        assert not descendants(services[0].process.pid)
        assert "/dev/shm" not in Path(f"/proc/{services[0].process.pid}/maps").read_text()
        code = await end(services[0], HOW[how])
        assert code == {"told twice": -signal.SIGTERM, "killed": -signal.SIGKILL}.get(how, 0)
        if code == 0:
            assert list(sockets.iterdir()) == []
        again = start_executor(tmp_path, *flags, endpoint=endpoint)  # what a killed one has left is in nobody's way
        services.append(again)
        again.wait_until_ready()
        streaming.cancel()
        await asyncio.gather(streaming, return_exceptions=True)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["told to stop", "killed"])
async def test_an_executor_with_a_model_leaves_nothing_behind(tmp_path: Path, how: str) -> None:
    """Torch has ways of its own to share memory, and compilers are processes."""
    directory = save_tiny(tmp_path, "llama")
    flags = ["--model", str(directory), "--dtype", "float32", "--num-blocks", "100"]
    with cleaned_up([start_executor(tmp_path, *flags, of_its_own=True)]) as services:
        endpoint = services[0].wait_until_ready().address
        services.append(start_scheduler(tmp_path, endpoint, "--executor-wait-s", "1"))
        streaming = await busy(services[1].wait_until_ready().address)
        assert not descendants(services[0].process.pid)
        assert "/dev/shm" not in Path(f"/proc/{services[0].process.pid}/maps").read_text()
        assert await end(services[0], HOW[how]) == {"told to stop": 0, "killed": -signal.SIGKILL}[how]
        services.append(start_executor(tmp_path, *flags, endpoint=endpoint, of_its_own=True))
        services[2].wait_until_ready()
        streaming.cancel()
        await asyncio.gather(streaming, return_exceptions=True)


async def test_a_scheduler_ends_with_the_process_that_started_it_and_so_does_what_it_started(tmp_path: Path) -> None:
    """At once: not after the time that it would give its calls if it were told to stop, nor that which they take."""
    with cleaned_up([start_executor(tmp_path, "--simulate", "--simulate-fixed-us", "50000")]) as services:
        endpoint, file = services[0].wait_until_ready().address, tmp_path / "address"
        command = [sys.executable, "-m", "scheduler_svc", "--executor-endpoint", endpoint, "--exit-with-parent"]
        command += ["--listen-address", "127.0.0.1:0", "--address-file", str(file), "--shutdown-grace-s", "600"]
        starter = f"import subprocess, sys; p = subprocess.Popen({command!r}); "
        starter += "print(p.pid, flush=True); sys.stdin.read()"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", starter], **pipes) as parent:  # type: ignore[call-overload]
            pid = int(parent.stdout.readline())
            wait_for(file.exists, "the scheduler")
            streaming = await busy(file.read_text().strip())
            family = {pid, *descendants(pid)}
            parent.kill()
        wait_for(lambda: not any(map(lives, family)), "the scheduler and its worker to end", 20)
        assert os.getpid() not in family
        streaming.cancel()
        await asyncio.gather(streaming, return_exceptions=True)
