"""Who could reach the scheduler where it is to listen, or read what it tells executors: beyond this machine nobody may
whom nothing holds back."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from paged.addresses import is_local_endpoint, is_loopback, unguarded_metrics


class Guards(Protocol):
    """The settings that matter."""

    listen_address: str
    metrics_address: str | None
    block_map_address: str | None
    insecure: bool
    tls_certificate: Path | None
    tls_private_key: Path | None
    tls_client_ca: Path | None
    token_file: Path | None
    curve_key_file: Path | None
    curve_executor_key: Path | None

    @property
    def executor_endpoints(self) -> Sequence[str]: ...


def unguarded(settings: Guards) -> Iterator[str]:
    """What is missing of these settings, a sentence each."""
    has_tls = settings.tls_certificate is not None
    if has_tls != (settings.tls_private_key is not None):
        yield "--tls-certificate and --tls-private-key go together; give both or neither"
    if settings.tls_client_ca is not None and not has_tls:
        yield "--tls-client-ca needs --tls-certificate and --tls-private-key"
    if (settings.curve_key_file is None) != (settings.curve_executor_key is None):
        yield "--curve-key-file and --curve-executor-key go together; give both or neither"
    if settings.insecure:
        return
    yield from unguarded_metrics(settings.metrics_address)
    yield from _unguarded_address(settings, "--listen-address", settings.listen_address)
    if settings.block_map_address is not None:
        yield from _unguarded_address(settings, "--block-map-address", settings.block_map_address)
    endpoints = [endpoint for endpoint in settings.executor_endpoints if not is_local_endpoint(endpoint)]
    if endpoints and settings.curve_key_file is None:
        yield (
            f"--executor-endpoint {','.join(endpoints)} is not on this machine: prompts and answers could be read on "
            "their way, and anything could pass for an executor; give --curve-key-file and --curve-executor-key, which "
            "`paged keys create` makes. --insecure goes without, for a network that is closed by other means"
        )


def _unguarded_address(settings: Guards, flag: str, address: str) -> Iterator[str]:
    if is_loopback(address.rpartition(":")[0]):
        return
    missing = []
    if settings.tls_certificate is None:
        missing.append("--tls-certificate and --tls-private-key, for nobody to listen in")
    if settings.token_file is None and settings.tls_client_ca is None:
        missing.append("--token-file or --tls-client-ca, for nobody to call who may not")
    if missing:
        yield (
            f"{flag} {address} can be reached from other machines; it needs "
            f"{'; and '.join(missing)}. `paged keys create` makes them. --insecure goes without, for a network "
            "that is closed by other means"
        )
