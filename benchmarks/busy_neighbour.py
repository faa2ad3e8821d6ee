"""What an executor of a real model on a CPU makes beside processes that always have something to do.

The demo's model unless another is named, a scheduler, NUM_STREAMS streams that are read all the time; by turns alone
and beside `--busy` processes that count. `ratio`: tokens a second beside them by those alone, the median of all pairs.
A fair share beside one is two thirds of two cores: the executor's two threads and that process have as much each.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from paged.cli.processes import (
    EXECUTOR_READY_S,
    SCHEDULER_READY_S,
    Service,
    address_file,
    endpoint_file,
    serving,
    start_executor,
    start_scheduler,
    while_alive,
    written,
)
from paged.cli.waiting import small_model
from paged.client import Client

NUM_STREAMS, MAX_TOKENS = 8, 400
FLAGS = ["--max-rows", "16", "--tokens-per-step", "256", "--num-blocks", "1024"]
SETTLE_S = 0.5


class Streams:
    """So many at once, each followed by another; and the tokens that have come."""

    def __init__(self, client: Client, temperature: float) -> None:
        self._client, self._temperature = client, temperature
        self._num_tokens = 0

    async def read(self) -> None:
        await asyncio.gather(*(self._read(number) for number in range(NUM_STREAMS)))

    async def _read(self, number: int) -> None:
        prompt = [300 + number] * 8
        options: dict[str, Any] = {"temperature": self._temperature, "top_p": 0.95, "seed": number}
        while True:
            async for message in self._client.generate(prompt, max_tokens=MAX_TOKENS, ignore_eos=True, **options):
                self._num_tokens += len(message.token_ids)

    async def rate(self, seconds: float) -> float:
        """Tokens a second from now on."""
        await asyncio.sleep(SETTLE_S)
        begin, before = time.perf_counter(), self._num_tokens
        await asyncio.sleep(seconds)
        return (self._num_tokens - before) / (time.perf_counter() - begin)


@contextmanager
def busy(num_processes: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def measure(
    flags: list[str], *, num_busy: int, rounds: int, seconds: float, temperature: float
) -> dict[str, float]:
    """Medians of the rounds: tokens a second alone and beside others, and their ratio. Raises ServiceFailed."""
    services: list[Service] = []
    with tempfile.TemporaryDirectory(prefix="paged-busy-") as name:
        directory = Path(name)
        try:
            services.append(await start_executor(directory, [*flags, *FLAGS], log_path=directory / "executor.log"))
            endpoint = await while_alive(written(endpoint_file(directory), EXECUTOR_READY_S), *services)
            services.append(await start_scheduler(directory, endpoint, log_path=directory / "scheduler.log"))
            address = await while_alive(serving(address_file(directory), SCHEDULER_READY_S), *services)
            work = _rates(address, num_busy, rounds, seconds, temperature)
            alone, beside = await while_alive(work, *services)
        finally:
            for service in reversed(services):
                await service.stop()
    ratios = [one / other for one, other in zip(beside, alone, strict=True)]
    return {
        "alone_tok_s": round(median(alone), 1),
        "beside_tok_s": round(median(beside), 1),
        "ratio": round(median(ratios), 3),
    }


async def _rates(
    address: str, num_busy: int, rounds: int, seconds: float, temperature: float
) -> tuple[list[float], list[float]]:
    alone, beside = [], []
    async with Client(address) as client:
        streams = Streams(client, temperature)
        reading = asyncio.create_task(streams.read())
        try:
            for _ in range(rounds):
                alone.append(await streams.rate(seconds))
                with busy(num_busy):
                    beside.append(await streams.rate(seconds))
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
    return alone, beside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Directory or hub id; a small model is prepared if not given.")
    parser.add_argument("--busy", type=int, default=1, help="Processes beside the services.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="Of each half of a round.")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the most likely tokens.")
    parser.add_argument("--json", action="store_true", help="Figures alone, on one line.")
    arguments = parser.parse_args()
    asyncio.run(_main(arguments))


async def _main(arguments: argparse.Namespace) -> None:
    model = arguments.model or await small_model(Console(stderr=True))
    found = await measure(
        ["--model", model],
        num_busy=arguments.busy,
        rounds=arguments.rounds,
        seconds=arguments.seconds,
        temperature=arguments.temperature,
    )
    if arguments.json:
        print(json.dumps(found))
    else:
        print("alone {alone_tok_s} tokens/s, beside others {beside_tok_s}: {ratio}".format(**found))


if __name__ == "__main__":
    main()
