"""The small real model in an executor's container, with the kernels that its image has: no compiler is there."""

import json
from pathlib import Path

import pytest

from executor_svc.model.demo_model import demo_model_path
from paged.client import Client
from tests.containers.stack import Stack
from tests.processes import cleaned_up, start_executor, start_scheduler
from tests.system.requests import ready

pytestmark = [pytest.mark.slow, pytest.mark.model]

PROMPT, MAX_TOKENS = "The capital of France is", 16
SIZE = ("--num-blocks", "64", "--max-model-len", "512")


async def test_a_container_says_what_the_same_says_outside(
    stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = demo_model_path()
    monkeypatch.setenv("PAGED_PROOF_MODEL", str(model))
    monkeypatch.setenv("PAGED_MODEL", "/models/demo")
    stack.overrides = ("tests/containers/model.yaml",)
    stack.up()
    run = ["run", "--rm", "--no-deps", "-T", "client", "generate", "--json", "--temperature", "0"]
    said = json.loads(stack.compose(*run, PROMPT, "--max-tokens", str(MAX_TOKENS)).stdout)
    logs = stack.compose("logs", "executor").stdout
    assert '"event": "ready"' in logs
    assert "native_kernels_not_used" not in logs
    stack.compose("stop", "executor")  # it leaves no room for another

    executor = start_executor(tmp_path, "--model", str(model), *SIZE)
    with cleaned_up([executor]) as services:
        services.append(start_scheduler(tmp_path, executor.wait_until_ready(180).address))
        async with Client(services[1].wait_until_ready().address) as client:
            await ready(client)
            whole = await client.complete(PROMPT, max_tokens=MAX_TOKENS, temperature=0)
    print(f"the model in a container: {PROMPT}{said['text']}")
    assert said["text"] == whole.text
