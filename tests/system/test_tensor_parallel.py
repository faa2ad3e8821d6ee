"""One model in two processes that torchrun starts (gloo), through the whole system. Judged by the margin rule."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paged.client import Client
from tests.margin import reference_model
from tests.processes import Service, cleaned_up, start_executor, start_scheduler, torchrun, wait_for
from tests.system.requests import idle_load, ready
from tests.system.test_real_models import Answered, ask, judge, mixed
from tests.tiny_models import CONFIGS, VOCAB_SIZE, save_model, save_tiny

POOL = ["--dtype", "float32", "--block-size", "4", "--num-blocks", "40", "--max-rows", "8", "--tokens-per-step", "12"]


def save_two_headed(root: Path, family: str) -> Path:
    """One of CONFIGS, with two KV heads at least."""
    config = CONFIGS[family]()
    config.num_key_value_heads = max(2, config.num_key_value_heads)
    return save_model(root / family, config)


def start_two(directory: Path, model: Path, *flags: str, restarts: int = 0) -> Service:
    """It listens at the same place after a restart."""
    launcher = torchrun(2, "--max-restarts", str(restarts))
    endpoint = f"ipc://{directory}/plans"
    return start_executor(directory, "--model", str(model), *POOL, *flags, endpoint=endpoint, launcher=launcher)


def all_gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


async def serve(services: list[Service], directory: Path, wanted: list[Answered]) -> None:
    """One alone, then the others together, in a pool too small for them."""
    services.append(start_scheduler(directory, services[0].wait_until_ready().address))
    async with Client(services[1].wait_until_ready().address) as client:
        await ready(client)
        await ask(client, wanted[0], 20)
        await asyncio.gather(*[ask(client, one, 20) for one in wanted[1:]])
        load = await idle_load(client)
    assert load.preemptions > 0
    assert load.cached_prompt_tokens > 0
    assert load.used_blocks == 0


def judge_all(model: Path, wanted: list[Answered], num_outputs: int) -> None:
    reference = reference_model(model)
    for answered in wanted:
        assert len(answered.ids) == num_outputs
        judge(reference, answered)


async def test_margins_hold_and_all_ranks_end_when_one_hangs(tmp_path: Path) -> None:
    model, wanted = save_two_headed(tmp_path, "qwen3"), mixed(14, VOCAB_SIZE, 40, random.Random(1))
    with cleaned_up([]) as services:
        services.append(start_two(tmp_path, model, "--rank-timeout-s", "5"))
        await serve(services, tmp_path, wanted)
        ranks = services[0].ranks
        os.kill(ranks[1], signal.SIGSTOP)
        async with Client(services[1].address) as client:
            asked = asyncio.create_task(client.complete([1, 2, 3], max_tokens=5))
            await asyncio.to_thread(wait_for, lambda: all_gone([ranks[0]]), "the end of rank 0", 20)
            os.kill(ranks[1], signal.SIGCONT)  # or torchrun would kill it, half a minute later
            assert await asyncio.to_thread(services[0].process.wait, 20) == 1
            asked.cancel()
        assert all_gone(list(ranks.values()))
        assert "did not answer within rank_timeout_s" in services[0].log
    judge_all(model, wanted, 20)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "number"), [("gemma3", signal.SIGKILL), ("mistral", signal.SIGTERM)])
async def test_margins_hold_and_all_ranks_end_with_torchrun(
    family: str, number: signal.Signals, tmp_path: Path
) -> None:
    model, wanted = save_two_headed(tmp_path, family), mixed(14, VOCAB_SIZE, 40, random.Random(3))
    with cleaned_up([]) as services:
        services.append(start_two(tmp_path, model))
        await serve(services, tmp_path, wanted)
        ranks = list(services[0].ranks.values())
        services[0].process.send_signal(number)
        services[0].process.wait(30)
        wait_for(lambda: all_gone(ranks), "the end of all ranks", 10)
        assert services[0].log.count("stopped") == (2 if number == signal.SIGTERM else 0)
    judge_all(model, wanted, 20)


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
async def test_answers_are_right_when_a_rank_is_killed_and_all_are_started_anew(rank: int, tmp_path: Path) -> None:
    model, wanted = save_tiny(tmp_path, "llama"), mixed(14, VOCAB_SIZE, 40, random.Random(2))
    with cleaned_up([]) as services:
        services.append(start_two(tmp_path, model, restarts=1))
        services.append(start_scheduler(tmp_path, services[0].wait_until_ready().address))
        async with Client(services[1].wait_until_ready().address) as client:
            await ready(client)
            before = services[0].ranks
            running = [asyncio.create_task(ask(client, one, 60)) for one in wanted]
            while (await client.load()).generated_tokens < 100:
                await asyncio.sleep(0.01)
            os.kill(before[rank], signal.SIGKILL)
            await asyncio.gather(*running)
            load = await idle_load(client)
        after = services[0].ranks
        assert after.keys() == before.keys()
        assert all_gone(list(before.values()))
        services[0].process.send_signal(signal.SIGINT)
        services[0].process.wait(30)
        assert all_gone(list(after.values()))
        assert services[0].log.count("stopped") == 2
    assert load.executor_losses == 1
    assert load.used_blocks == 0
    judge_all(model, wanted, 60)


def test_a_model_that_two_processes_cannot_share_is_refused_by_both(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "gemma3")
    command = [sys.executable, *torchrun(2), "-m", "executor_svc", "--model", str(model), "--endpoint"]
    ended = subprocess.run(
        [*command, f"ipc://{tmp_path}/plans"], capture_output=True, text=True, timeout=180, check=False
    )
    assert ended.returncode == 1
    assert "num_key_value_heads is 1, which 2 processes cannot share" in ended.stderr
