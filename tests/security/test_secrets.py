"""What must never be told: prompts, answers, salts, tokens, keys (C10.2); and what a default start opens (C10.1)."""

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest

from paged.client import Client, PagedClientError
from scheduler_svc.settings import parse_settings
from tests.processes import descendants
from tests.security.keys import Keys
from tests.security.sockets import listening
from tests.system.conftest import System
from tests.system.requests import idle_load, ready

SOURCES = ("paged", "scheduler_svc", "executor_svc", "kernels")
PROMPT, SALT, STOP, MODEL = "marker-in-a-prompt", "marker-in-a-salt", "marker-in-a-stop-string", "marker-in-a-name"
LOOPBACK, MAPPED_LOOPBACK = "0100007F", "0000000000000000FFFF00000100007F"
POISON = [777, 778, 779, 780]


async def failing(client: Client, *args: object, **options: object) -> str:
    """What the caller is told."""
    with pytest.raises(PagedClientError) as caught:
        await client.complete(*args, **options)  # type: ignore[arg-type]
    return str(caught.value)


async def test_c10_2_nothing_of_what_clients_send_or_get_is_in_logs_figures_or_others_errors(
    system: System, keys: Keys, tmp_path: Path
) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"faults": [{"row_of_prompt": POISON, "kind": "not_finite"}]}))
    loud = ["--log-level", "debug"]
    system.executor_flags = ["--simulate-script", str(script), *keys.executor_flags, *loud]
    system.scheduler_flags = ["--executor-wait-s", "0.3", *keys.scheduler_flags, *keys.link_flags, *loud]
    system.start()
    texts = []
    async with (
        Client(system.address, credentials=keys.credentials, token=keys.operator) as client,
        Client(system.address, credentials=keys.credentials, token=f"paged_{PROMPT}") as stranger,
    ):
        await ready(client)
        whole = await client.complete(PROMPT, max_tokens=30, cache_salt=SALT, temperature=0)
        texts += [whole.text, str(whole.token_ids)]
        await client.complete(PROMPT, max_tokens=2, regex="[ab]{9}")  # which takes a process of its own
        processes = {
            pid for s in (system.executor, system.scheduler) for pid in (s.process.pid, *descendants(s.process.pid))
        }
        assert len(processes) == 3
        shown = "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in processes)
        for options in ({"temperature": 1000.0}, {"regex": f"({PROMPT}"}, {"stop": [STOP] * 20}, {"model": MODEL}):
            await failing(client, PROMPT, cache_salt=SALT, **options)
        await failing(client, PROMPT, max_tokens=4000, timeout_s=0.05, cache_salt=SALT)
        others = [await failing(stranger, PROMPT), await failing(client, POISON, max_tokens=9, temperature=0)]
        running = asyncio.create_task(failing(client, PROMPT, max_tokens=4000, cache_salt=SALT))
        while not (await client.load()).running_sequences:
            await asyncio.sleep(0.01)
        system.executor.kill()
        others += [await running, await failing(client, "another prompt")]
        figures = [str(await client.load()), str(await client.models())]
        system.restart_executor()
        await idle_load(client)
    assert system.scheduler.stop() == 0
    logs = system.scheduler.log + system.executor.log
    for event in ("call_refused", "executor_lost", "attached", "answer_failed"):
        assert event in logs, event
    secrets = [keys.operator, f"paged_{PROMPT}", *secret_keys(keys)]
    for marker in (PROMPT, SALT, STOP, MODEL, *texts, *secrets):
        assert len(marker) > 10
        assert marker not in logs, marker
        for told in (*others, *figures, shown):
            assert marker not in told, (marker, told)


def secret_keys(keys: Keys) -> list[str]:
    files = [file.read_text() for file in keys.directory.rglob("*") if file.is_file()]
    curve = [text.split('secret-key = "')[1].split('"')[0] for text in files if "secret-key" in text]
    private = [text.splitlines()[1] for text in files if "PRIVATE KEY" in text]
    assert (len(curve), len(private)) == (2, 3)
    return curve + private


def test_settings_hold_paths_and_no_secrets(keys: Keys) -> None:
    settings = parse_settings([*keys.scheduler_flags, *keys.link_flags])
    shown = repr(settings) + settings.model_dump_json()
    assert str(keys.token_file) in shown
    for secret in (keys.operator, *secret_keys(keys)):
        assert secret not in shown


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's tables of sockets")
async def test_c10_1_a_default_start_listens_on_loopback_alone(system: System) -> None:
    system.start()
    for service in (system.executor, system.scheduler):
        hosts = {host for host, _ in listening(service)}
        assert hosts
        assert hosts <= {LOOPBACK, MAPPED_LOOPBACK}


def test_c10_1_nothing_that_comes_from_outside_can_become_code() -> None:
    """No source of ours names what turns bytes into objects or code."""
    turns = re.compile(
        r"\b(c?pickle|dill|marshal|shelve|joblib)\b|_pyobj\(|(torch|yaml)\.load\(|(?<![\w.])(eval|exec)\("
    )
    files = [file for package in SOURCES for file in Path(package).rglob("*.py")]
    assert len(files) > 200
    found = [f"{file}: {match[0]}" for file in files for match in [turns.search(file.read_text())] if match]
    assert found == []
