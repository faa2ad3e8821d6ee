"""The native operations of one level, compiled where they have not been before.

Each level's library registers its operations under `torch.ops.paged_cpu_<level>`, so one process may hold several.
"""

from pathlib import Path
from typing import Any

import torch

from kernels.cpu.compiling import CACHE, BuildError, Told, find_or_build, silent
from kernels.cpu.levels import LEVELS, emulated, supported

__all__ = ["BuildError", "ops"]


def ops(level: str | None = None, cache_dir: Path = CACHE, told: Told = silent) -> Any:
    """The namespace of `level`'s operations, by default that of the best level that this CPU runs.

    Raises BuildError where there is no such level, no compiler, or the CPU lacks the level's instructions.
    """
    name = level or (supported() or ("",))[0]
    if name not in LEVELS:
        raise BuildError(f"there are none for this CPU{f' of level {name}' if name else ''}")
    if name not in _loaded:  # once, from whichever directory: operations cannot be registered twice
        _loaded[name] = _load(name, cache_dir, told)
    return _loaded[name]


_loaded: dict[str, Any] = {}


def _load(name: str, cache_dir: Path, told: Told) -> Any:
    known = supported()
    if name not in (*known, *emulated()):
        raise BuildError(f"this CPU does not run those of level {name}; it runs {', '.join(known) or 'none'}")
    library = find_or_build(LEVELS[name], cache_dir, told)
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise BuildError(f"{library} does not load: {error}") from error
    return getattr(torch.ops, f"paged_cpu_{name}")
