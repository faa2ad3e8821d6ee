"""`paged demo`: one executor and one scheduler on loopback, eight prompts at once, and what that took."""

import asyncio
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from paged.cli.processes import DemoFailed, Service, serving, while_alive, written
from paged.cli.show import Board, board
from paged.client import Client
from paged.v1 import control_pb2, inference_pb2

T = TypeVar("T")

PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "Once upon a time, in a village by the sea,",
    "The three primary colours are",
    "To bake a simple loaf of bread, you need",
    "A prime number is a number that",
    "The largest planet of the solar system is",
    "Good morning! The weather today",
]
MAX_PROMPT_TOKENS = 32
BLOCK_SIZE = 16
FEWEST_BLOCKS = 512
EXECUTOR_READY_S = 900.0
SCHEDULER_READY_S = 60.0
ANSWERS_S = 600.0


async def run(model: str | None, *, simulate: bool, max_tokens: int) -> None:
    """The whole demonstration. Raises DemoFailed, or PagedClientError; no process is left behind either way."""
    console = Console()
    if model is None and not simulate:
        model = await _demo_model(console)
    with tempfile.TemporaryDirectory(prefix="paged-demo-") as directory:
        services: list[Service] = []
        try:
            flags = ["--model", model] if model else ["--simulate"]
            address = await _start(console, services, Path(directory), flags + _just_enough(max_tokens))
            await while_alive(_ask(console, address, max_tokens), *services)
        finally:
            codes = [(service.module, await service.stop()) for service in reversed(services)]
        if failed := [f"{module} with code {code}" for module, code in codes if code != 0]:
            raise DemoFailed(f"did not stop cleanly: {', '.join(failed)}")
        _say(console, "Both processes have stopped.")


async def _demo_model(console: Console) -> str:
    command = (sys.executable, "-m", "executor_svc.model.demo_model")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        output, _ = await _waiting(console, "the small model, which is prepared once", process.communicate())
    finally:
        if process.returncode is None:
            process.terminate()
    lines = output.decode().splitlines()
    if process.returncode != 0 or not lines:
        raise DemoFailed("the small model could not be prepared; name another one with --model, or use --simulate")
    return lines[-1]


def _just_enough(max_tokens: int) -> list[str]:
    """Executor flags for this handful of short requests: less memory to lay out and to warm up, so a sooner start."""
    num_tokens = len(PROMPTS) * (max_tokens + MAX_PROMPT_TOKENS)
    num_blocks = max(FEWEST_BLOCKS, 1 + num_tokens // BLOCK_SIZE + len(PROMPTS))
    return [
        *("--block-size", str(BLOCK_SIZE), "--num-blocks", str(num_blocks)),
        *("--max-rows", str(2 * len(PROMPTS)), "--tokens-per-step", str(len(PROMPTS) * MAX_PROMPT_TOKENS)),
    ]


async def _start(console: Console, services: list[Service], directory: Path, executor_flags: list[str]) -> str:
    """Starts both services, adding each to `services` at once; returns the scheduler's address when it is ready."""
    endpoint_file, address_file = directory / "endpoint", directory / "address"
    executor = await Service.start(
        "executor_svc",
        ["--endpoint", "tcp://127.0.0.1:0", "--endpoint-file", str(endpoint_file), *executor_flags],
        directory / "executor.log",
    )
    services.append(executor)
    loaded = while_alive(written(endpoint_file, EXECUTOR_READY_S), *services)
    endpoint = await _waiting(console, "the executor, which loads the model", loaded)
    scheduler = await Service.start(
        "scheduler_svc",
        ["--listen-address", "127.0.0.1:0", "--address-file", str(address_file), "--executor-endpoint", endpoint],
        directory / "scheduler.log",
    )
    services.append(scheduler)
    ready = while_alive(serving(address_file, SCHEDULER_READY_S), *services)
    return await _waiting(console, "the scheduler", ready)


async def _ask(console: Console, address: str, max_tokens: int) -> None:
    async with Client(address) as client:
        began = time.perf_counter()
        with board(console, PROMPTS) as shown:
            asks = [_answer(client, shown, index, max_tokens) for index in range(len(PROMPTS))]
            usages = await asyncio.gather(*asks)
        seconds = time.perf_counter() - began
        _report(console, usages, seconds, await client.load(), (await client.model()).block_size)


async def _answer(client: Client, shown: Board, index: int, max_tokens: int) -> inference_pb2.Usage:
    usage = inference_pb2.Usage()
    answer = client.generate(
        PROMPTS[index], max_tokens=max_tokens, temperature=0.8, top_p=0.95, seed=index, timeout_s=ANSWERS_S
    )
    async for message in answer:
        shown.add(index, message.text)
        usage.MergeFrom(message.usage)
    shown.finish(index)
    return usage


def _report(
    console: Console,
    usages: list[inference_pb2.Usage],
    seconds: float,
    load: control_pb2.GetLoadResponse,
    block_size: int,
) -> None:
    tokens = sum(usage.completion_tokens for usage in usages)
    slots = load.peak_used_blocks * block_size
    waste = load.peak_unused_slots / slots if slots else 0.0
    _say(
        console,
        f"\n{tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s\n"
        f"{load.peak_running_sequences} sequences ran at once\n"
        f"{load.peak_used_blocks} of {load.total_blocks} blocks were used at the peak; "
        f"{load.peak_unused_slots} of their {slots} slots held no token ({waste:.1%} waste)",
    )


async def _waiting(console: Console, what: str, work: Coroutine[Any, Any, T]) -> T:
    began = time.perf_counter()
    if console.is_terminal:
        with console.status(f"Waiting for {what}"):
            result = await work
    else:
        _say(console, f"Waiting for {what} ...")
        result = await work
    _say(console, f"{what[0].upper()}{what[1:]}: ready after {time.perf_counter() - began:.1f} s")
    return result


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
