"""What a command says while it waits, and the small model that commands use where none is named."""

import asyncio
import sys
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from rich.console import Console

from paged.cli.processes import ServiceFailed

T = TypeVar("T")


def say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


async def waiting(console: Console, what: str, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; says what is waited for, and how long it took."""
    began = time.perf_counter()
    if console.is_terminal:
        with console.status(f"Waiting for {what}"):
            result = await work
    else:
        say(console, f"Waiting for {what} ...")
        result = await work
    say(console, f"{what[0].upper()}{what[1:]}: ready after {time.perf_counter() - began:.1f} s")
    return result


async def small_model(console: Console) -> str:
    """Where the small model is, once it has been prepared. Raises ServiceFailed."""
    command = (sys.executable, "-m", "executor_svc.model.demo_model")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        output, _ = await waiting(console, "the small model, which is prepared once", process.communicate())
    finally:
        if process.returncode is None:
            process.terminate()
    lines = output.decode().splitlines()
    if process.returncode != 0 or not lines:
        raise ServiceFailed("the small model could not be prepared; name another one with --model, or use --simulate")
    return lines[-1]
