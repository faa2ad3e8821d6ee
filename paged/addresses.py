"""What an address says about who can reach it."""

import ipaddress
from collections.abc import Iterator


def is_loopback(host: str) -> bool:
    """Whether nothing but this machine can reach what listens there. A name other than localhost may mean anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def has_one_address(target: str) -> bool:
    """Whether gRPC can find no more than one server by this target. A name may stand for any number of them."""
    scheme, colon, rest = target.partition(":")
    if colon and scheme in ("unix", "unix-abstract"):
        return True
    if colon and scheme in ("ipv4", "ipv6"):
        return "," not in rest
    host = target.removeprefix("dns:").rpartition("/")[2].rpartition(":")[0]
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def is_local_endpoint(endpoint: str) -> bool:
    """The same of ZeroMQ's tcp://HOST:PORT and ipc://PATH. A path without a file (ipc://@NAME) is open to everybody."""
    kind, _, place = endpoint.partition("://")
    return not place.startswith("@") if kind == "ipc" else is_loopback(place.rpartition(":")[0])


def unguarded_metrics(address: str | None) -> Iterator[str]:
    """A sentence on metrics, which are plain HTTP without authentication, where others than this machine can read."""
    if address is not None and not is_loopback(address.rpartition(":")[0]):
        yield (
            f"--metrics-address {address} can be read by whoever reaches it: read it on this machine, or give "
            "--insecure; the other guards stay as they are"
        )
