"""The one error of loading, and the check that both ways of loading share."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_MAX_REASON_CHARS = 500


class ModelRefused(Exception):
    """The model cannot be served as it should be; the text says why and what to do. Nothing has been served yet."""


def reason(error: Exception) -> str:
    """Kind and text of somebody else's error, in one line of bounded length."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:_MAX_REASON_CHARS]}{'...' if len(text) > _MAX_REASON_CHARS else ''}"


def check_complete(source: Path, report: Mapping[str, Iterable[Any]], names: Iterable[str]) -> None:
    """`report` is what transformers tells of a load, `names` are those of the model's own weights.

    Raises ModelRefused where a weight was not found, was of another shape, or where weights of a kind that the model
    has were left over, as those of layers past the last one.
    """
    if missing := sorted(report["missing_keys"]):
        raise ModelRefused(
            f"{source} lacks weights that would be left at random values: {', '.join(missing[:5])}"
            f"{' and others' if len(missing) > 5 else ''}; the checkpoint does not fit its configuration"
        )
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, wanted = mismatched[0]
        raise ModelRefused(
            f"{source} stores {name} as {list(stored)} where its configuration wants {list(wanted)}"
            f"{f', and {len(mismatched) - 1} others alike' if len(mismatched) > 1 else ''}; "
            "the checkpoint does not fit its configuration"
        )
    kinds = {_kind(name) for name in names}
    if more := sorted(name for name in report["unexpected_keys"] if _kind(name) in kinds):
        raise ModelRefused(
            f"{source} holds more of what the model is made of than its configuration names: {', '.join(more[:3])}; "
            "the checkpoint does not fit its configuration"
        )


def _kind(name: str) -> str:
    """Layers and experts are numbered."""
    return re.sub(r"\d+", "#", name)
