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
from tests.system.test_real_models import ask, judge, mixed
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


@pytest.mark.parametrize("family", ["qwen3", "gemma3", pytest.param("mistral", marks=pytest.mark.slow)])
async def test_margins_hold_alone_together_chunked_cached_and_preempted(family: str, tmp_path: Path) -> None:
    directory = save_two_headed(tmp_path, family)
    wanted = mixed(14, VOCAB_SIZE, 40, random.Random(1))
    with cleaned_up([]) as services:
        services.append(start_two(tmp_path, directory))
        endpoint = services[0].wait_until_ready().address
        services.append(start_scheduler(tmp_path, endpoint))
        async with Client(services[1].wait_until_ready().address) as client:
            await ready(client)
            await ask(client, wanted[0], 20)
            await asyncio.gather(*[ask(client, one, 20) for one in wanted[1:]])
            load = await idle_load(client)
        ranks = list(services[0].ranks.values())
        services[0].process.send_signal(signal.SIGINT)
        services[0].process.wait(30)
        assert services[0].log.count("stopped") == len(ranks) == 2, services[0].log
        assert all_gone(ranks)
    assert load.preemptions > 0
    assert load.cached_prompt_tokens > 0
    assert load.used_blocks == 0
    reference = reference_model(directory)
    for answered in wanted:
        assert len(answered.ids) == 20
        judge(reference, answered)


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
async def test_answers_are_right_when_a_rank_is_killed_and_all_are_started_anew(rank: int, tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, "llama")
    wanted = mixed(14, VOCAB_SIZE, 40, random.Random(2))
    with cleaned_up([]) as services:
        services.append(start_two(tmp_path, directory, restarts=1))
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
        assert all_gone(list(before.values()))
        assert services[0].ranks.keys() == before.keys()
    assert load.executor_losses == 1
    assert load.used_blocks == 0
    reference = reference_model(directory)
    for answered in wanted:
        assert len(answered.ids) == 60
        judge(reference, answered)


async def test_all_ranks_end_when_one_hangs(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, "llama")
    with cleaned_up([]) as services:
        services.append(start_two(tmp_path, directory, "--rank-timeout-s", "2"))
        services.append(start_scheduler(tmp_path, services[0].wait_until_ready().address))
        async with Client(services[1].wait_until_ready().address) as client:
            await ready(client)
            ranks = services[0].ranks
            os.kill(ranks[1], signal.SIGSTOP)
            asked = asyncio.create_task(client.complete([1, 2, 3], max_tokens=5))
            await asyncio.to_thread(wait_for, lambda: all_gone([ranks[0]]), "the end of rank 0", 20)
            os.kill(ranks[1], signal.SIGCONT)  # or torchrun would kill it, half a minute later
            await asyncio.to_thread(services[0].process.wait, 20)
            assert all_gone(list(ranks.values()))
            asked.cancel()
        assert services[0].process.returncode != 0
        assert "did not answer within rank_timeout_s" in services[0].log


def test_a_model_that_two_processes_cannot_share_is_refused_by_both(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, "gemma3")
    command = [sys.executable, *torchrun(2), "-m", "executor_svc", "--model", str(model), "--endpoint"]
    ended = subprocess.run(
        [*command, f"ipc://{tmp_path}/plans"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "num_key_value_heads is 1, which 2 processes cannot share" in ended.stderr
