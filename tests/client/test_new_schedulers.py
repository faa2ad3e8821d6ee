"""A name that comes to stand for more schedulers: calls find the new ones by themselves."""

import asyncio
import socket
import struct

from paged.client import Client
from scheduler_svc.api.server import ApiServer
from scheduler_svc.settings import SchedulerSettings
from tests.api.scripted_engine import ScriptedEngine

FOUND_S = 40.0
A_RECORD = 1


class Names(asyncio.DatagramProtocol):
    """A name server for which every name has the same addresses."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses)

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport
        self.port: int = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, peer: tuple[str, int]) -> None:
        end = data.index(b"\0", 12) + 5  # of the question: a name, its type and class
        (kind,) = struct.unpack("!H", data[end - 4 : end - 2])
        found = self.addresses if kind == A_RECORD else []
        answers = b"".join(
            struct.pack("!HHHIH", 0xC00C, A_RECORD, 1, 0, 4) + socket.inet_aton(address) for address in found
        )
        self._transport.sendto(
            data[:2] + struct.pack("!HHHHH", 0x8180, 1, len(found), 0, 0) + data[12:end] + answers, peer
        )


async def test_a_scheduler_that_a_name_gets_later_is_given_calls() -> None:
    loop = asyncio.get_running_loop()
    transport, names = await loop.create_datagram_endpoint(lambda: Names("127.0.0.1"), local_addr=("127.0.0.1", 0))
    engines = [ScriptedEngine(), ScriptedEngine()]
    first = ApiServer(engines[0], SchedulerSettings(listen_address="127.0.0.1:0", max_connection_age_s=0.5))
    port = (await first.start()).rpartition(":")[2]
    second = ApiServer(engines[1], SchedulerSettings(listen_address=f"127.0.0.2:{port}"))
    try:
        async with Client(f"dns://127.0.0.1:{names.port}/schedulers.test:{port}") as client:
            assert (await client.complete("hi")).text == "Once!"
            await second.start()
            names.addresses.append("127.0.0.2")
            async with asyncio.timeout(FOUND_S):
                while not engines[1].submitted:
                    assert (await client.complete("hi")).text == "Once!"
                    await asyncio.sleep(0.02)
    finally:
        await second.stop(0)
        await first.stop(0)
        transport.close()
