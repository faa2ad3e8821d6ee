"""`paged demo`: one executor and one scheduler on loopback, eight prompts at once, and what that took."""

import asyncio
import tempfile
import time
from pathlib import Path

from rich.console import Console

from paged.cli.processes import (
    EXECUTOR_READY_S,
    SCHEDULER_READY_S,
    Service,
    ServiceFailed,
    address_file,
    endpoint_file,
    serving,
    start_executor,
    start_scheduler,
    while_alive,
    written,
)
from paged.cli.show import Board, board
from paged.cli.waiting import say, small_model, waiting
from paged.client import Client
from paged.v1 import control_pb2, inference_pb2

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
ANSWERS_S = 600.0


async def run(model: str | None, *, simulate: bool, max_tokens: int) -> None:
    """The whole demonstration. Raises ServiceFailed, or PagedClientError; no process is left behind either way."""
    console = Console()
    if model is None and not simulate:
        model = await small_model(console)
    with tempfile.TemporaryDirectory(prefix="paged-demo-") as directory:
        services: list[Service] = []
        try:
            flags = ["--model", model] if model else ["--simulate"]
            address = await _start(console, services, Path(directory), flags + _just_enough(max_tokens))
            await while_alive(_ask(console, address, max_tokens), *services)
        finally:
            codes = [(service.module, await service.stop()) for service in reversed(services)]
        if failed := [f"{module} with code {code}" for module, code in codes if code != 0]:
            raise ServiceFailed(f"did not stop cleanly: {', '.join(failed)}")
        say(console, "Both processes have stopped.")


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
    executor = await start_executor(directory, executor_flags, log_path=directory / "executor.log")
    services.append(executor)
    loaded = while_alive(written(endpoint_file(directory), EXECUTOR_READY_S), *services)
    endpoint = await waiting(console, "the executor, which loads the model", loaded)
    scheduler = await start_scheduler(directory, endpoint, log_path=directory / "scheduler.log")
    services.append(scheduler)
    ready = while_alive(serving(address_file(directory), SCHEDULER_READY_S), *services)
    return await waiting(console, "the scheduler", ready)


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
    say(
        console,
        f"\n{tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens/s\n"
        f"{load.peak_running_sequences} sequences ran at once\n"
        f"{load.peak_used_blocks} of {load.total_blocks} blocks were used at the peak; "
        f"{load.peak_unused_slots} of their {slots} slots held no token ({waste:.1%} waste)",
    )
