"""The one error of loading, and the check that both ways of loading share."""

from collections.abc import Iterable, Mapping
from pathlib import Path


class ModelRefused(Exception):
    """The model cannot be served as it should be; the text says why and what to do. Nothing has been served yet."""


def check_complete(source: Path, report: Mapping[str, Iterable[str]]) -> None:
    """`report` is what transformers tells of a load. Raises ModelRefused where a weight was not found."""
    if missing := sorted(report["missing_keys"]):
        raise ModelRefused(
            f"{source} lacks weights that would be left at random values: {', '.join(missing[:5])}"
            f"{' and others' if len(missing) > 5 else ''}; the checkpoint does not fit its configuration"
        )
