"""How answers that arrive at the same time are shown: a live table on a terminal, prefixed lines elsewhere."""

import unicodedata
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

LINE_CHARS = 72
REFRESHES_PER_SECOND = 10


def printable(text: str) -> str:
    """The text without control characters: a model's answer must not steer the terminal."""
    return "".join(c if c == "\n" or unicodedata.category(c) not in ("Cc", "Cs") else " " for c in text)


class Board(Protocol):
    """Where the answers to a list of prompts appear while they grow."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def add(self, index: int, text: str) -> None: ...
    def finish(self, index: int) -> None: ...


def board(console: Console, prompts: list[str]) -> Board:
    return LiveBoard(console, prompts) if console.is_terminal else LineBoard(console, prompts)


class LiveBoard:
    """One table that is drawn again as answers grow."""

    def __init__(self, console: Console, prompts: list[str]) -> None:
        self._prompts = prompts
        self._answers = [""] * len(prompts)
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=REFRESHES_PER_SECOND)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def add(self, index: int, text: str) -> None:
        self._answers[index] += printable(text)

    def finish(self, index: int) -> None:
        pass

    def _table(self) -> Table:
        table = Table(show_header=False, show_lines=True, expand=True)
        for prompt, answer in zip(self._prompts, self._answers, strict=True):
            table.add_row(Text(prompt, style="bold cyan").append(" ".join(answer.split("\n")), style="default"))
        return table


class LineBoard:
    """A line is printed as soon as an answer has filled it, with the number of its prompt before it."""

    def __init__(self, console: Console, prompts: list[str]) -> None:
        self._console = console
        self._prompts = prompts
        self._pending = [""] * len(prompts)

    def __enter__(self) -> Self:
        for index, prompt in enumerate(self._prompts):
            self._print(index, f"prompt: {prompt}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def add(self, index: int, text: str) -> None:
        pending = self._pending[index] + printable(text).replace("\n", " ")
        while len(pending) > LINE_CHARS:
            space = pending.rfind(" ", 1, LINE_CHARS)
            end = space if space > 0 else LINE_CHARS
            self._print(index, pending[:end].strip())
            pending = pending[end:]
        self._pending[index] = pending

    def finish(self, index: int) -> None:
        if self._pending[index].strip():
            self._print(index, self._pending[index].strip())
        self._pending[index] = ""

    def _print(self, index: int, line: str) -> None:
        self._console.print(f"[{index + 1}] {line}", markup=False, highlight=False, soft_wrap=True)
