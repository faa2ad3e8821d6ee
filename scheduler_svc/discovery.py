"""Where executors are: the endpoints that the settings name, with every address that a host name stands for."""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterable

import structlog

# The addresses of a host name. Raises OSError where it cannot be looked up, or has none.
Resolve = Callable[[str], Awaitable[list[str]]]

RESOLVE_TIMEOUT_S = 5.0
MAX_ADDRESSES = 1024  # of all names together: each is a socket and a lease

log = structlog.get_logger()


async def resolve(host: str) -> list[str]:
    """By the system's resolver; IPv6 only where there is no IPv4."""
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT_S):  # TimeoutError is an OSError
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a part between dots is empty, or too long
        raise OSError(f"no name of a host: {error}") from error
    addresses = {
        family: [str(a[4][0]) for a in found if a[0] is family] for family in (socket.AF_INET, socket.AF_INET6)
    }
    return addresses[socket.AF_INET] or addresses[socket.AF_INET6]


class Discovery:
    """Turns endpoints (`tcp://HOST:PORT`, `ipc://PATH`) into those of single executors, as often as it is asked."""

    def __init__(self, endpoints: Iterable[str], resolve: Resolve = resolve) -> None:
        self._endpoints = list(endpoints)
        self._resolve = resolve
        self._last: dict[str, list[str]] = {}  # addresses by host
        self._failed: set[str] = set()

    @property
    def is_fixed(self) -> bool:
        """Whether looking again could find nothing new."""
        return not any(_host(endpoint) for endpoint in self._endpoints)

    async def look(self) -> list[str]:
        """All endpoints, each once. A name that cannot be looked up keeps the addresses that it had."""
        hosts = sorted({host for endpoint in self._endpoints if (host := _host(endpoint))})
        for host, addresses in zip(hosts, await asyncio.gather(*map(self._addresses, hosts)), strict=True):
            self._last[host] = addresses
        found: dict[str, None] = {}
        for endpoint in self._endpoints:
            host = _host(endpoint)
            if host is None:
                found[endpoint] = None
            else:
                port = endpoint.rpartition(":")[2]
                found.update((_tcp(address, port), None) for address in self._last[host])
        if len(found) > MAX_ADDRESSES:
            log.warning("too_many_executors", found=len(found), used=MAX_ADDRESSES)
        return list(found)[:MAX_ADDRESSES]

    async def _addresses(self, host: str) -> list[str]:
        try:
            addresses = sorted(await self._resolve(host))
        except OSError as error:
            if host not in self._failed:
                log.warning("name_not_resolved", host=host, reason=str(error) or type(error).__name__)
                self._failed.add(host)
            return self._last.get(host, [])
        self._failed.discard(host)
        return addresses


def _host(endpoint: str) -> str | None:
    """The name that must be looked up, if there is one."""
    tcp = re.fullmatch(r"tcp://(.+):\d+", endpoint)
    if tcp is None:
        return None
    host = tcp[1]
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host
    return None


def _tcp(address: str, port: str) -> str:
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
