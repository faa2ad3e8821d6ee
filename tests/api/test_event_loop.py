"""gRPC's wake-ups are taken as they come, however many events there are in a turn of the loop."""

import asyncio
import fcntl
import socket
import struct
import termios
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVarTuple

import grpc
import grpc.aio

from scheduler_svc.event_loop import EventLoop

STREAMS = 400  # more events than gRPC's socket holds bytes
METHOD = "/test.Burst/All"
Ts = TypeVarTuple("Ts")


class WatchedLoop(EventLoop):
    """Remembers what gRPC has it read."""

    grpcs: socket.socket | None = None

    def add_reader(self, fd: Any, callback: Callable[[*Ts], Any], *args: *Ts) -> None:
        if isinstance(fd, socket.socket):
            self.grpcs = fd
        super().add_reader(fd, callback, *args)


def test_no_wake_ups_are_left_after_many_events_in_a_turn() -> None:
    with asyncio.Runner(loop_factory=WatchedLoop) as runner:
        runner.run(_burst())


async def _burst() -> None:
    everybody = asyncio.Event()
    num_waiting = 0

    async def answer(request: bytes, context: grpc.aio.ServicerContext) -> AsyncGenerator[bytes, None]:
        nonlocal num_waiting
        num_waiting += 1
        if num_waiting == STREAMS:
            everybody.set()
        await everybody.wait()
        for _ in range(4):
            yield b"message"

    server = grpc.aio.server()
    handler: Any = grpc.unary_stream_rpc_method_handler(answer)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Burst", {"All": handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.unary_stream(METHOD)
        read = await asyncio.gather(*(_messages(call(b"")) for _ in range(STREAMS)))
        assert read == [4] * STREAMS
        await asyncio.sleep(0)  # a turn for what has come last
        assert _bytes_waiting() < 50
    await server.stop(None)


async def _messages(call: Any) -> int:
    return len([message async for message in call])


def _bytes_waiting() -> int:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, WatchedLoop)
    assert loop.grpcs is not None
    (waiting,) = struct.unpack("i", fcntl.ioctl(loop.grpcs, termios.FIONREAD, bytes(4)))
    return int(waiting)
