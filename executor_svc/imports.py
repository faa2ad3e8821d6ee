"""Importing what serves a model, which is half of a short start: no more than the model needs, and without looking for
garbage among what is there to stay."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TORCHAO = "torchao"


def leave_out_torchao(model: str, *, trust_remote_code: bool) -> None:
    """Have transformers find torchao not installed, which it imports where it is, whatever the model: a second or two.

    To be called before transformers is imported. Does nothing where the model may need it: a checkpoint that torchao
    has quantised says so in its config.json.
    """
    if not trust_remote_code and not _may_name(model, _TORCHAO):
        sys.modules.setdefault(_TORCHAO, None)  # type: ignore[arg-type]  # Python's own sign for what cannot be had


def _may_name(model: str, package: str) -> bool:
    try:
        path = Path(model).expanduser()
        if path.is_file():  # a .gguf, which is converted to plain weights
            return False
        return package in (path / "config.json").read_text(encoding="utf-8")
    except (OSError, RuntimeError, ValueError):  # on the hub, or refused later
        return True


@contextmanager
def for_good() -> Iterator[None]:
    """What is imported meanwhile stays: no search for garbage goes through it, neither now nor later."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
