"""`paged bench`: asks a scheduler for more than a person could, and tells how it answered."""

import asyncio
import json
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from paged.cli.connection import Connection
from paged.client import DeadlineExceededError, PagedClientError
from paged.load.generator import Load, LoadGenerator
from paged.load.plot import check_plottable, draw
from paged.load.report import TIMES, TOO_BUSY, figures
from paged.load.seen import Seen

STRANGE_IDS = 300  # what lies below may be special tokens
CONCURRENCY, MAX_OPEN = 16, 4096
TICK_S = 0.25
WORDS = {
    "refused": "refused",
    "unfinished": "not answered in time",
    "unsent": "not sent, for too many were open",
}
SHOWN = ("mean", "p50", "p90", "p95", "p99", "max")


@dataclass(frozen=True, slots=True)
class Course:
    """How long, in seconds: before the window, the window, and how long answers may take to end after it."""

    warm_up_s: float
    measured_s: float
    drain_s: float


@dataclass(frozen=True, slots=True)
class Found:
    seen: Seen
    client_cpu_s: float
    last_error: PagedClientError | None

    @property
    def failure(self) -> PagedClientError | None:
        """What the command ends with: something failed that is no refusal, or nothing was answered at all."""
        if self.seen.failed or not self.seen.finished:
            return self.last_error or (self._too_late if self.seen.unfinished else None)
        return None

    @property
    def _too_late(self) -> PagedClientError:
        return DeadlineExceededError(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer had ended after --drain-s")


def length_range(text: str) -> tuple[int, int]:
    """Of 128 or 32-96. Raises ValueError."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    shortest, longest = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= shortest <= longest:
        raise ValueError(f"{text!r} must be a number of tokens from 1, or a range such as 32-96")
    return shortest, longest


async def run(connection: Connection, load: Load, course: Course, *, as_json: bool, plot: Path | None) -> None:
    """Raises PagedClientError, after the figures are shown if there are any; ValueError for what no model could do."""
    if plot is not None:
        check_plottable(plot)
    load = await _fitting(connection, load)
    console = Console(stderr=as_json)
    found = await _measured(connection, load, course, console)
    told = figures(load, found.seen, client_cpu_s=found.client_cpu_s)
    if as_json:
        print(json.dumps(told))
    else:
        show(console, told)
    if plot is not None:
        draw(found.seen, _title(load), plot)
    if (failure := found.failure) is not None:
        raise failure


async def _fitting(connection: Connection, load: Load) -> Load:
    """The load, of ids and lengths that the model has."""
    async with connection.client(load.target) as client:
        model = await client.model(load.model)
    if load.mix is None and (most := load.prompt_tokens[1] + load.output_tokens[1]) > model.max_model_len:
        raise ValueError(
            f"prompts and outputs of up to {most} tokens together are asked for; {model.model} takes "
            f"{model.max_model_len}: give shorter ones with --prompt-tokens and --output-tokens"
        )
    ids = (min(STRANGE_IDS, model.vocab_size - 1), min(load.ids[1], model.vocab_size))
    return replace(load, longest=min(load.longest, model.max_model_len), ids=ids)


async def _measured(connection: Connection, load: Load, course: Course, console: Console) -> Found:
    channel, metadata = connection.channel(load.target)
    async with channel, LoadGenerator(load, channel, metadata) as generator:
        with _progress(console) as progress:
            await _sleep(progress, "warming up", course.warm_up_s)
            generator.begin()
            began_cpu_s = time.process_time()
            await _sleep(progress, "measuring", course.measured_s)
            client_cpu_s = time.process_time() - began_cpu_s
            seen = generator.end()
            progress.add_task("waiting for the last answers", total=None)
            await generator.drained(course.drain_s)
        return Found(seen, client_cpu_s, generator.last_error)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


async def _sleep(progress: Progress, what: str, seconds: float) -> None:
    task = progress.add_task(what, total=seconds)
    end = time.monotonic() + seconds
    while (left_s := end - time.monotonic()) > 0:
        await asyncio.sleep(min(left_s, TICK_S))
        progress.update(task, completed=seconds - max(end - time.monotonic(), 0))
    progress.remove_task(task)


def show(console: Console, told: dict[str, Any]) -> None:
    requests = told["requests"]
    counts = [f"{requests['sent']} requests sent in {told['seconds']:.1f} s", f"{requests['finished']} answered"]
    counts += [f"{requests[name]} {word}" for name, word in WORDS.items() if requests[name]]
    counts += [f"{count} ended with {code}" for code, count in requests["failed"].items()]
    console.print(", ".join(counts), markup=False, highlight=False)
    console.print(
        f"{told['tokens_per_s']:.0f} tokens/s, {told['requests_per_s']:.2f} answers/s, "
        f"{told['tokens_per_message']:.2f} tokens a message",
        highlight=False,
    )
    table = Table("milliseconds", *(Column(name, justify="right") for name in SHOWN))
    for name, word in TIMES.items():
        if told[name]:
            table.add_row(word, *(_short(told[name][column]) for column in SHOWN))
    if table.row_count:
        console.print(table)
    if told["client_cores"] > TOO_BUSY:
        console.print(
            f"This client used {told['client_cores']:.2f} of a core: times are its own, too. Run several of it.",
            highlight=False,
        )


def _short(milliseconds: float) -> str:
    """So that the table fits into the 80 columns of a terminal, or of a log."""
    return f"{milliseconds:,.1f}" if milliseconds < 1000 else f"{milliseconds:,.0f}"


def _title(load: Load) -> str:
    pace = f"{load.streams} at once" if load.rate is None else f"{load.rate:g} requests a second"
    if load.mix is not None:
        return f"{pace}, lengths of the mix {load.mix}"
    (least_in, most_in), (least_out, most_out) = load.prompt_tokens, load.output_tokens
    return f"{pace}, {least_in}-{most_in} tokens in, {least_out}-{most_out} out"
