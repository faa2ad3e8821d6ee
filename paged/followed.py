"""Files that are read again when they change: certificates, keys and tokens are replaced while services run."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

LOOK_S = 1.0  # at most between a change and its effect on whoever asks
# What changed this recently may change again without looking changed: clocks of files are coarse.
SETTLED_NS = 2_000_000_000

_Looks = tuple[tuple[int, int, int] | None, ...]


class Followed(Generic[T]):
    """What `load` has made of some files. It is made anew, when `current` is asked for, after any of them has changed.

    What cannot be used any more (`load` raises OSError or ValueError) is told to `on_failure`, once for each change,
    and what there was stays. At first it is raised. A directory stands for the names in it and for its own files.
    """

    def __init__(
        self,
        paths: Iterable[Path],
        load: Callable[[], T],
        on_failure: Callable[[Exception], None],
        *,
        on_change: Callable[[T], None] = lambda value: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = list(paths)
        self._load = load
        self._on_failure, self._on_change = on_failure, on_change
        self._clock = clock
        self._failed: _Looks | None = None
        self._loaded, self._value = self._loaded_now()
        self._next_look = clock() + LOOK_S

    @property
    def current(self) -> T:
        if self._clock() >= self._next_look:
            self._next_look = self._clock() + LOOK_S
            looks = self._look()
            if looks != self._loaded:
                self._reload(looks)
        return self._value

    def _reload(self, looks: _Looks) -> None:
        before = self._value
        try:
            self._loaded, self._value = self._loaded_now()
        except (OSError, ValueError) as error:
            if looks != self._failed:
                self._failed = looks
                self._on_failure(error)
            return
        self._failed = None
        if self._value != before:
            self._on_change(self._value)

    def _loaded_now(self) -> tuple[_Looks | None, T]:
        looks, now = self._look(), time.time_ns()
        value = self._load()
        is_settled = looks == self._look() and all(look is None or now - look[0] > SETTLED_NS for look in looks)
        return looks if is_settled else None, value

    def _look(self) -> _Looks:
        return tuple(look for path in self._paths for look in _looks_of(path))


def _looks_of(path: Path) -> list[tuple[int, int, int] | None]:
    try:
        inside = sorted(path.iterdir()) if path.is_dir() else []
    except OSError:  # it went meanwhile
        inside = []
    return [_stat(file) for file in (path, *inside)]


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
