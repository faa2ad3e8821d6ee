"""How far a start has come: a bar on a terminal, log events elsewhere."""

import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, TypeVar

import structlog
from tqdm import tqdm
from transformers.utils.logging import set_tqdm_hook

log = structlog.get_logger(__name__)

EVENTS_EVERY_S = 10.0

T = TypeVar("T")

Progress = Callable[[str, int, int], None]
"""Told of a stage, such as `packing weights`, how many of how many parts are done: first 0, and all of them last."""


def silent(stage: str, done: int, total: int) -> None:
    """A Progress that nobody sees."""


@contextmanager
def shown_progress(stream: TextIO | None = None) -> Iterator[Progress]:
    """Shows stages one after another, on `stream` (stderr if left out) where that is a terminal."""
    shown_on = sys.stderr if stream is None else stream
    progress = _Bars(shown_on) if shown_on.isatty() else _Events()
    try:
        yield progress
    finally:
        progress.close()


def tracked(progress: Progress, stage: str, parts: Collection[T]) -> Iterator[T]:
    """The parts, of which each is done when the next is asked for."""
    for done, part in enumerate(parts):
        progress(stage, done, len(parts))
        yield part
    progress(stage, len(parts), len(parts))


@contextmanager
def transformers_told(progress: Progress, stage: str) -> Iterator[None]:
    """What transformers would show a bar for is this stage, and its own bars are not shown."""

    def tell(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        parts = args[0] if args else options.get("iterable")
        return tracked(progress, stage, parts) if isinstance(parts, Collection) else factory(*args, **options)

    before = set_tqdm_hook(tell)
    try:
        yield
    finally:
        set_tqdm_hook(before)


class _Bar(tqdm):
    monitor_interval = 0  # no thread beside the model's


class _Bars:
    """One bar at a time, gone when its stage is done: what stays on the screen are log lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._stage = ""
        self._bar: Any = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._bar is None or stage != self._stage:
            self.close()
            self._stage = stage
            self._bar = _Bar(total=total, desc=stage, file=self._stream, leave=False, dynamic_ncols=True)
        self._bar.update(done - self._bar.n)
        if done >= total:
            self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class _Events:
    """An event where a stage begins, one where it ends, and some between if it takes long."""

    def __init__(self) -> None:
        self._stage = ""
        self._began = self._last = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._began, self._last = stage, now, now
            log.info("stage_began", stage=stage, parts=total)
        if done >= total:
            log.info("stage_ended", stage=stage, parts=total, seconds=round(now - self._began, 1))
            self.close()
        elif now - self._last >= EVENTS_EVERY_S:
            self._last = now
            log.info("stage_goes_on", stage=stage, done=done, parts=total)

    def close(self) -> None:
        self._stage = ""
