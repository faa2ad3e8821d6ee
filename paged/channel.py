"""How a client is connected: to all schedulers that its target names, in turn, to each as long as it takes requests."""

import json
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from paged.credentials import is_local_target

# What a scheduler says of this name to its health service: whether it takes new requests. It does until it is told to
# stop, and with or without an executor.
ACCEPTING = "paged.v1.Accepting"
# In the initial metadata of a call that many answers share: which scheduler it is, by a name that no other process has.
SCHEDULER_KEY = "paged-scheduler"
KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS = 30_000, 10_000
MIN_RESOLUTION_MS = 2_000  # between two look-ups of the target's name
MAX_RECONNECT_MS = 5_000  # between attempts to reach a scheduler that is away

_SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": ACCEPTING},
}


def channel_options(max_message_bytes: int) -> list[tuple[str, Any]]:
    """gRPC's own names. `max_message_bytes` is for either direction."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        # A name is looked up again when a connection ends, which schedulers see to (max_connection_age_s).
        ("grpc.dns_min_time_between_resolutions_ms", MIN_RESOLUTION_MS),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_MS),
        ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ]


def open_channel(
    address: str,
    *,
    credentials: grpc.ChannelCredentials | None,
    authority: str | None,
    with_token: bool,
    insecure: bool,
    max_message_bytes: int,
    given: Sequence[tuple[str, Any]] = (),
) -> grpc.aio.Channel:
    """To a target of gRPC's; needs a running event loop. Options that are `given` go before our own.

    Raises ValueError where calls that bring a token would leave the machine unencrypted, unless `insecure`.
    """
    if with_token and credentials is None and not insecure:
        if not is_local_target(address):
            raise ValueError(f"token: would go to {address} unencrypted; give credentials, or insecure=True")
        given = [("grpc.enable_http_proxy", 0), *given]
    if authority is not None:
        names = ("grpc.default_authority", "grpc.ssl_target_name_override")
        given = [*((name, authority) for name in names), *given]
    names_given = {name for name, _ in given}
    options = [option for option in channel_options(max_message_bytes) if option[0] not in names_given] + list(given)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)
