"""The command line as a user runs it, against real processes (the executor is the simulated one)."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.api.scripted_engine import ScriptedEngine

END_S = 60.0
ANSWER_LINE = b"[1] prompt"


class Demo:
    """A `paged demo --simulate` under way, with its temporary files under `directory`."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path) -> None:
        self.process = process
        self._directory = directory

    async def result(self) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        out, err = await asyncio.wait_for(self.process.communicate(), END_S)
        assert self.process.returncode is not None
        return self.process.returncode, out.decode(), err.decode()

    async def has_begun(self) -> None:
        assert self.process.stdout is not None
        async with asyncio.timeout(END_S):
            while not (await self.process.stdout.readline()).startswith(ANSWER_LINE):
                pass

    def processes(self) -> list[str]:
        """Command lines of the services that still run."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if str(self._directory) in command:
                found.append(command)
        return found


@asynccontextmanager
async def demo(directory: Path, *flags: str, **environment: str) -> AsyncIterator[Demo]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "paged.cli", "demo", "--simulate", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(directory), **environment},
    )
    try:
        yield Demo(process, directory)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def slow_steps() -> dict[str, str]:
    return {"PAGED_EXECUTOR_SIMULATE_FIXED_US": "200000"}


async def test_the_demo_answers_eight_prompts_tells_figures_and_leaves_nothing(tmp_path: Path) -> None:
    async with demo(tmp_path, "--max-tokens", "20", PAGED_EXECUTOR_SIMULATE_FIXED_US="10000") as running:
        code, out, err = await running.result()
    assert code == 0, err
    for number in range(1, 9):
        lines = [line for line in out.splitlines() if line.startswith(f"[{number}] ")]
        assert len(lines) >= 2, out
    assert "160 tokens in" in out
    assert "8 sequences ran at once" in out
    assert "waste" in out
    assert running.processes() == []
    assert list(tmp_path.iterdir()) == []


async def test_a_service_that_cannot_start_is_told_with_its_log(tmp_path: Path) -> None:
    async with demo(tmp_path, PAGED_EXECUTOR_SIMULATE_EOS_ID="999999") as running:
        code, _, err = await running.result()
    assert code == 1
    assert "executor_svc ended with code 2" in err
    assert "simulate_eos_id 999999" in err


async def test_an_executor_that_dies_while_it_answers_ends_the_demo(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"faults": [{"step": 3, "kind": "exit"}]}))
    async with demo(tmp_path, PAGED_EXECUTOR_SIMULATE_SCRIPT=str(script)) as running:
        code, _, err = await running.result()
    assert code == 1
    assert "executor_svc ended with code 1" in err
    assert running.processes() == []


async def test_an_interrupt_stops_the_services_too(tmp_path: Path) -> None:
    async with demo(tmp_path, **slow_steps()) as running:
        await running.has_begun()
        assert len(running.processes()) == 2
        running.process.send_signal(signal.SIGINT)
        code, _, _ = await running.result()
    assert code == 130
    assert running.processes() == []


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux's")
async def test_a_killed_demo_takes_its_services_along(tmp_path: Path) -> None:
    async with demo(tmp_path, **slow_steps()) as running:
        await running.has_begun()
        running.process.kill()
        async with asyncio.timeout(END_S):
            while running.processes():
                await asyncio.sleep(0.02)


async def paged(*arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "paged.cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), END_S)
    return process.returncode, out.decode(), err.decode()


async def test_generate_streams_the_answer(address: str, engine: ScriptedEngine) -> None:
    assert await paged("generate", "hi", "--address", address, "--max-tokens", "7", "--seed", "3") == (0, "Once!\n", "")
    (request,) = engine.submitted
    assert (request.max_tokens, request.sampling.seed, request.prompt_ids) == (7, 3, [104, 105])


async def test_an_answer_cannot_steer_the_terminal(address: str, engine: ScriptedEngine) -> None:
    from scheduler_svc.requests import Delta, Finish, Usage

    engine.script = [Delta("a\x1b[2Jb\nc\x9b", [1], [], Finish(), Usage(1, 1, 0))]
    assert (await paged("generate", "hi", "--address", address))[1] == "a [2Jb\nc \n"


async def test_info_shows_model_and_load(address: str) -> None:
    code, out, _ = await paged("info", "--address", address)
    assert code == 0
    assert "ScriptedForCausalLM" in out
    assert "running_sequences" in out


async def test_a_call_that_fails_is_one_line_and_exit_1(address: str) -> None:
    code, _, err = await paged("generate", "hi", "--address", address, "--temperature", "1000")
    assert code == 1
    assert err.splitlines() == ["paged: INVALID_ARGUMENT: sampling.temperature: is 1000; must be in [0, 100]"]


async def test_without_the_extra_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; import paged.cli; paged.cli.main()"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stderr=asyncio.subprocess.PIPE)
    _, err = await process.communicate()
    assert process.returncode == 1
    assert "paged-inference[cli]" in err.decode()
