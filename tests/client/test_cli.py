"""The command line as a user runs it, against real processes (the executor is the simulated one)."""

import asyncio
import json
import os
import pty
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from paged.cli.app import app
from paged.cli.exit_codes import ExitCode
from scheduler_svc import errors
from scheduler_svc.requests import Delta
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


async def test_the_demo_is_objects_for_scripts_and_its_progress_is_not_among_them(tmp_path: Path) -> None:
    async with demo(tmp_path, "--max-tokens", "20", "--json") as running:
        code, out, err = await running.result()
    assert code == 0, err
    *answers, figures = map(json.loads, out.splitlines())
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [20] * 8
    assert (figures["tokens"], figures["blocks"]) == (160, 511)
    assert 0 < figures["unused_slots"] < figures["slots"]
    assert "Both processes have stopped." in err


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
    from scheduler_svc.requests import Finish, Usage

    engine.script = [Delta("a\x1b[2Jb\nc\x9b", [1], [], Finish(), Usage(1, 1, 0))]
    assert (await paged("generate", "hi", "--address", address))[1] == "a [2Jb\nc \n"


async def test_info_shows_model_and_load(address: str) -> None:
    code, out, _ = await paged("info", "--address", address)
    assert code == 0
    assert "ScriptedForCausalLM" in out
    assert "running_sequences" in out


async def test_replay_is_done_by_an_executor_of_its_own_which_says_what_is_wrong(tmp_path: Path) -> None:
    code, _, err = await paged("replay", str(tmp_path / "nowhere"), "--json")
    assert code == 2
    assert err.splitlines() == [f"paged replay: {tmp_path / 'nowhere'}: No such file or directory"]


async def test_a_call_that_fails_is_one_line_and_a_code_that_says_what_kind_it_was(address: str) -> None:
    code, _, err = await paged("generate", "hi", "--address", address, "--temperature", "1000")
    assert code == ExitCode.REFUSED == 4
    assert err.splitlines() == ["paged: INVALID_ARGUMENT: sampling.temperature: is 1000; must be in [0, 100]"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.Unavailable("away"), 3),
        (errors.ModelNotFound("no"), 4),
        (errors.DeadlineExceeded("late"), 5),
        (errors.QueueFull("full", 60.0), 6),
        (errors.RequestAborted("ended"), 7),
        (errors.RequestFailed("broken"), 1),
    ],
)
def test_each_kind_of_failure_has_its_code(
    error: errors.PagedError, code: int, in_thread: str, engine: ScriptedEngine
) -> None:
    engine.script = [Delta("On", [11]), error]
    done = CliRunner().invoke(app, ["generate", "hi", "--address", in_thread])
    assert (done.exit_code, done.stdout) == (code, "On")
    assert done.stderr.startswith("paged: ")


def test_all_codes_are_in_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs/command_line.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\w+) \|", page, re.MULTILINE)
    assert {(int(number), name) for number, name in rows} == {(code.value, code.name) for code in ExitCode}


class TestForScripts:
    def test_every_command_can_be_asked_for_json(self) -> None:
        commands = typer.main.get_command(app).commands
        keys = commands.pop("keys")
        del commands["replay"]  # hands its flags on
        for command in (*commands.values(), *keys.commands.values()):
            assert "--json" in {flag for parameter in command.params for flag in parameter.opts}, command.name

    def test_keys_are_told_by_their_files(self, tmp_path: Path) -> None:
        def told(*arguments: str) -> list[dict[str, str]]:
            done = CliRunner().invoke(app, ["keys", *arguments, "--json"])
            assert done.exit_code == 0, done.output
            return [json.loads(line) for line in done.stdout.splitlines()]

        made = tmp_path / "made"
        files = told("create", str(made), "--host", "localhost")
        assert {found["file"] for found in files} == {str(path) for path in made.rglob("*") if path.is_file()}
        assert {"file": str(made / "operator.token"), "mode": "600"} in files
        (token,) = told("token", str(made / "tokens.toml"), "shop")
        assert token["name"] == "shop"
        assert token["token"] not in (made / "tokens.toml").read_text()
        assert told("token", str(made / "tokens.toml"), "other", "--out", str(made / "out")) == [
            {"name": "other", "file": str(made / "out")}
        ]
        pair = told("curve", str(made), "more") + told("certificate", str(made / "tls"), "more")
        assert all(Path(found["file"]).exists() for found in pair)
        assert len(pair) == 4

    def test_an_answer_is_one_object(self, in_thread: str, engine: ScriptedEngine) -> None:
        done = CliRunner().invoke(app, ["generate", "hi", "--address", in_thread, "--json"])
        (request,) = engine.submitted
        assert json.loads(done.stdout) == {
            "request_id": request.request_id,
            "text": "Once!",
            "finish": {"reason": "FINISH_REASON_STOP", "token_id": 2},
            "usage": {"prompt_tokens": 5, "completion_tokens": 5, "cached_tokens": 4},
        }

    def test_so_are_facts(self, in_thread: str) -> None:
        told = json.loads(CliRunner().invoke(app, ["info", "--address", in_thread, "--json"]).stdout)
        assert told["models"][0]["architecture"] == "ScriptedForCausalLM"
        assert told["load"]["executor_attached"] is True

    def test_a_conversation_is_read_from_a_file_and_all_of_it_is_sent_each_time(
        self, in_thread: str, engine: ScriptedEngine, tmp_path: Path
    ) -> None:
        saved = tmp_path / "saved.json"
        lines = [
            "one",
            "",
            "/undo",
            "two",
            "three",
            f"/save {saved}",
            "/what",
            "/system be brief",
            "four",
            "/quit",
            "five",
        ]
        done = CliRunner().invoke(app, ["chat", "--address", in_thread, "--system", "s", "--json"], "\n".join(lines))
        assert done.exit_code == 0, done.output
        assert [json.loads(line)["text"] for line in done.stdout.splitlines()] == ["Once!"] * 4
        sent = ["".join(map(chr, request.prompt_ids)) for request in engine.submitted]
        assert sent == [
            "<system>s<user>one",
            "<system>s<user>two",
            "<system>s<user>two<assistant>Once!<user>three",
            "<system>be brief<user>four",
        ]
        assert [turn["content"] for turn in json.loads(saved.read_text())] == ["s", "two", "Once!", "three", "Once!"]
        assert "[forgotten]" in done.stderr
        assert "/undo " in done.stderr  # the help, for what is no command

    def test_a_conversation_that_is_read_ends_at_an_error(self, in_thread: str, engine: ScriptedEngine) -> None:
        engine.script = [errors.Unavailable("away")]
        done = CliRunner().invoke(app, ["chat", "--address", in_thread, "--timeout-s", "0.2"], "one\ntwo\n")
        assert done.exit_code in (ExitCode.UNAVAILABLE, ExitCode.DEADLINE)

    def test_what_happens_is_one_picture_or_one_object(self, in_thread: str) -> None:
        done = CliRunner().invoke(app, ["top", "--address", in_thread, "--period-ms", "100", "--json"])
        told = json.loads(done.stdout)
        assert (told["num_requests"], told["executors"]) == (0, [])
        done = CliRunner().invoke(app, ["top", "--address", in_thread, "--period-ms", "100"])
        assert done.exit_code == 0
        assert "tokens/s" in done.stdout

    def test_a_shell_can_complete_it(self) -> None:
        done = CliRunner().invoke(
            app,
            [],
            env={"_PAGED_COMPLETE": "complete_bash", "COMP_WORDS": "paged to", "COMP_CWORD": "1"},
            prog_name="paged",
        )
        assert "top" in done.stdout.split()


async def test_an_interrupt_ends_top_cleanly_and_gives_the_screen_back(address: str) -> None:
    primary, secondary = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "paged.cli", "top", "--address", address),
        stdin=secondary,
        stdout=secondary,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
    )
    os.close(secondary)
    shown = b""
    loop = asyncio.get_running_loop()
    try:
        while b"tokens/s" not in shown:
            shown += await asyncio.wait_for(loop.run_in_executor(None, os.read, primary, 65536), END_S)
        process.send_signal(signal.SIGINT)
        rest = b""
        while b"\x1b[?1049l" not in rest:  # the screen as it was before
            rest += await asyncio.wait_for(loop.run_in_executor(None, os.read, primary, 65536), END_S)
        _, err = await asyncio.wait_for(process.communicate(), END_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(primary)
    assert (process.returncode, err) == (0, b"")


async def test_without_the_extra_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; import paged.cli; paged.cli.main()"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stderr=asyncio.subprocess.PIPE)
    _, err = await process.communicate()
    assert process.returncode == 1
    assert "paged-inference[cli]" in err.decode()
