"""`paged demo`: one executor and one scheduler on loopback, eight prompts at once, and what that took."""

import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from paged.cli.answers import Answer
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
from paged.v1 import control_pb2

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


async def run(model: str | None, *, simulate: bool, max_tokens: int, as_json: bool = False) -> None:
    """The whole demonstration. As JSON, standard output is an object for each answer, then one of figures. Raises
    ServiceFailed, or PagedClientError; no process is left behind either way."""
    console = Console(stderr=as_json)
    if model is None and not simulate:
        model = await small_model(console)
    with tempfile.TemporaryDirectory(prefix="paged-demo-") as directory:
        services: list[Service] = []
        try:
            flags = ["--model", model] if model else ["--simulate"]
            address = await _start(console, services, Path(directory), flags + _just_enough(max_tokens))
            answers, figures = await while_alive(_ask(console, address, max_tokens), *services)
        finally:
            codes = [(service.module, await service.stop()) for service in reversed(services)]
        if failed := [f"{module} with code {code}" for module, code in codes if code != 0]:
            raise ServiceFailed(f"did not stop cleanly: {', '.join(failed)}")
        say(console, "Both processes have stopped.")
    if as_json:
        print(*(answer.as_json() for answer in answers), json.dumps(figures), sep="\n")


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


async def _ask(console: Console, address: str, max_tokens: int) -> tuple[list[Answer], dict[str, Any]]:
    """The answers to all prompts, and figures."""
    async with Client(address) as client:
        began = time.perf_counter()
        with board(console, PROMPTS) as shown:
            asks = [_answer(client, shown, index, max_tokens) for index in range(len(PROMPTS))]
            answers = await asyncio.gather(*asks)
        seconds = time.perf_counter() - began
        figures = _figures(answers, seconds, await client.load(), (await client.model()).block_size)
    say(
        console,
        "\n{tokens} tokens in {seconds:.1f} s: {tokens_per_s:.0f} tokens/s\n"
        "{peak_sequences} sequences ran at once\n"
        "{peak_blocks} of {blocks} blocks were used at the peak; {unused_slots} of their {slots} slots held no token "
        "({waste:.1%} waste)".format(**figures),
    )
    return answers, figures


async def _answer(client: Client, shown: Board, index: int, max_tokens: int) -> Answer:
    whole = Answer()
    answer = client.generate(
        PROMPTS[index], max_tokens=max_tokens, temperature=0.8, top_p=0.95, seed=index, timeout_s=ANSWERS_S
    )
    async for message in answer:
        shown.add(index, message.text)
        whole.take(message)
    shown.finish(index)
    return whole


def _figures(
    answers: list[Answer], seconds: float, load: control_pb2.GetLoadResponse, block_size: int
) -> dict[str, Any]:
    tokens = sum(answer.usage.completion_tokens for answer in answers)
    slots = load.peak_used_blocks * block_size
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "peak_sequences": load.peak_running_sequences,
        "peak_blocks": load.peak_used_blocks,
        "blocks": load.total_blocks,
        "slots": slots,
        "unused_slots": load.peak_unused_slots,
        "waste": load.peak_unused_slots / slots if slots else 0.0,
    }
