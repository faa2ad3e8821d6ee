"""Endpoints and host names become the addresses of executors."""

import socket

import pytest

from scheduler_svc.discovery import Discovery, resolve


class Names:
    """A resolver whose answers a test changes."""

    def __init__(self, **addresses: list[str]) -> None:
        self.addresses = addresses
        self.asked: list[str] = []

    async def __call__(self, host: str) -> list[str]:
        self.asked.append(host)
        if host not in self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "unknown name")
        return self.addresses[host]


async def test_a_name_stands_for_all_its_addresses_and_is_looked_up_each_time() -> None:
    names = Names(executor=["10.0.0.2", "10.0.0.1"])
    discovery = Discovery(["tcp://executor:5555"], names)
    assert await discovery.look() == ["tcp://10.0.0.1:5555", "tcp://10.0.0.2:5555"]
    names.addresses["executor"] = ["10.0.0.3", "fd00::1"]
    assert await discovery.look() == ["tcp://10.0.0.3:5555", "tcp://[fd00::1]:5555"]


async def test_addresses_and_paths_are_taken_as_they_are() -> None:
    names, endpoints = Names(), ["ipc:///tmp/x:5", "tcp://127.0.0.1:1", "tcp://[::1]:2"]
    assert await Discovery(endpoints, names).look() == endpoints
    assert names.asked == []


async def test_several_names_of_one_executor_are_one_endpoint() -> None:
    names = Names(a=["10.0.0.1"], b=["10.0.0.1", "10.0.0.2"])
    discovery = Discovery(["tcp://a:1", "tcp://b:1", "tcp://10.0.0.2:1"], names)
    assert await discovery.look() == ["tcp://10.0.0.1:1", "tcp://10.0.0.2:1"]


async def test_a_name_that_is_not_found_for_a_while_keeps_its_addresses() -> None:
    names = Names(executor=["10.0.0.1"])
    discovery = Discovery(["tcp://executor:1", "tcp://other:1"], names)
    assert await discovery.look() == ["tcp://10.0.0.1:1"]
    names.addresses = {"other": ["10.0.0.9"]}
    assert await discovery.look() == ["tcp://10.0.0.1:1", "tcp://10.0.0.9:1"]


async def test_the_systems_resolver_is_asked() -> None:
    assert await resolve("localhost") == ["127.0.0.1"]
    with pytest.raises(OSError):
        await resolve("no-such-host.invalid")


@pytest.mark.parametrize("host", ["a..b", "a" * 70])
async def test_what_can_be_no_name_is_found_nowhere(host: str) -> None:
    assert await Discovery([f"tcp://{host}:1", "tcp://127.0.0.1:1"]).look() == ["tcp://127.0.0.1:1"]
