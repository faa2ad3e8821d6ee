"""Who could reach the executor where it is to listen: beyond this machine nobody may whom nothing holds back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from paged.addresses import is_local_endpoint, unguarded_metrics


class Guards(Protocol):
    """The settings that matter."""

    endpoint: str
    metrics_address: str | None
    insecure: bool
    curve_key_file: Path | None
    curve_allowed_keys: Path | None


def unguarded(settings: Guards) -> Iterator[str]:
    """What is missing of these settings, a sentence each."""
    if (settings.curve_key_file is None) != (settings.curve_allowed_keys is None):
        yield "--curve-key-file and --curve-allowed-keys go together; give both or neither"
    if settings.insecure:
        return
    yield from unguarded_metrics(settings.metrics_address)
    if settings.curve_key_file is None and not is_local_endpoint(settings.endpoint):
        yield (
            f"--endpoint {settings.endpoint} can be reached from elsewhere, and whoever reaches it may use the model; "
            "give --curve-key-file and --curve-allowed-keys, which `paged keys create` makes. --insecure goes without, "
            "for a network that is closed by other means"
        )
