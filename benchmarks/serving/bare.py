"""What gRPC alone takes of a process that streams: a grpc.aio server with nothing behind it, read as schedulers are.

It serves Generate, and once so many streams are open sends each a ready-made message in every period, evenly: as many
in a turn of the same event loop as our delivery sends, and with as many turns between for what gRPC has to tell.
"""

import argparse
import asyncio
import tempfile
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from benchmarks.serving.served import process_cpu_s
from benchmarks.serving.streams import READY_S, LoadProcess
from paged.cli.processes import Service, while_alive, written
from paged.load.generator import METHOD, Load
from paged.v1 import inference_pb2
from scheduler_svc.api.server import write_atomically
from scheduler_svc.delivery import MESSAGES_IN_A_TURN, TURNS_BETWEEN
from scheduler_svc.event_loop import EventLoop
from scheduler_svc.parent import exit_with_parent

TEXT_CHARACTERS = 4  # of a token
SETTLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Bare:
    """CPU of the whole process for a message, and messages a second."""

    message_us: float
    messages_s: float


async def bare(num_streams: int, period_ms: float, tokens: int, seconds: float) -> Bare:
    """Of a server in a process of its own, read by another. Raises ServiceFailed."""
    with tempfile.TemporaryDirectory(prefix="paged-bare-") as name:
        directory = Path(name)
        file = directory / "address"
        flags = [
            "--streams",
            str(num_streams),
            "--period-ms",
            str(period_ms),
            "--tokens",
            str(tokens),
            "--file",
            str(file),
        ]
        server = await Service.start("benchmarks.serving.bare", [*flags, "--file", str(file)], directory / "bare.log")
        try:
            address = await while_alive(written(file, READY_S), server)
            async with LoadProcess.of(Load(f"ipv4:{address}", num_streams)) as readers:
                await asyncio.sleep(SETTLE_S)
                cpu_s = process_cpu_s(server.pid)
                readers.begin()
                await asyncio.sleep(seconds)
                cpu_s = process_cpu_s(server.pid) - cpu_s
                seen = await readers.end()
        finally:
            await server.stop()
    return Bare(1e6 * cpu_s / seen.messages, seen.messages / seen.seconds)


class Turns:
    """Lets the streams go on in turn, each once in a period."""

    def __init__(self, num_streams: int, period_s: float) -> None:
        self._num_streams = num_streams
        self._period_s = period_s
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_open = 0
        self._began = 0.0
        self._num_sent = 0

    def opened(self) -> None:
        self._num_open += 1
        if self._num_open == self._num_streams:
            self._began = self._loop.time()
            self._loop.call_soon(self._turn)

    async def mine(self) -> None:
        turn: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(turn)
        await turn

    def _turn(self) -> None:
        due = int((self._loop.time() - self._began) * self._num_streams / self._period_s)
        for _ in range(min(MESSAGES_IN_A_TURN, due - self._num_sent, len(self._waiting))):
            self._num_sent += 1
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
        if self._num_sent < due:
            self._num_sent = max(self._num_sent, due - self._num_streams)  # what is later than a period is left out
            self._let_pass(TURNS_BETWEEN)
        else:
            self._loop.call_later(0.001, self._turn)

    def _let_pass(self, num_turns: int) -> None:
        """Have a turn after so many that are for others."""
        if num_turns:
            self._loop.call_soon(self._let_pass, num_turns - 1)
        else:
            self._loop.call_soon(self._turn)


async def serve(num_streams: int, period_ms: float, tokens: int, file: Path) -> None:
    turns = Turns(num_streams, period_ms / 1000)
    message = inference_pb2.GenerateResponse(
        request_id="0" * 32, text="t" * TEXT_CHARACTERS * tokens, token_ids=range(10_000, 10_000 + tokens)
    ).SerializeToString()

    async def generate(request: bytes, context: grpc.aio.ServicerContext) -> AsyncGenerator[bytes, None]:
        turns.opened()
        while True:
            await turns.mine()
            yield message

    service, _, method = METHOD[1:].partition("/")
    server = grpc.aio.server()
    asynchronous: Any = generate
    handlers: dict[str, Any] = {method: grpc.unary_stream_rpc_method_handler(asynchronous)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    write_atomically(file, f"127.0.0.1:{port}\n")
    await server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--period-ms", type=float, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="in each message")
    parser.add_argument("--file", type=Path, required=True, help="for the address")
    parser.add_argument("--exit-with-parent", action="store_true")
    args = parser.parse_args()
    if args.exit_with_parent:
        exit_with_parent()
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(serve(args.streams, args.period_ms, args.tokens, args.file))


if __name__ == "__main__":
    main()
