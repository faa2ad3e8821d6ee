"""What lies between two machines: connections that carry all bytes, until one is cut or nothing moves any more."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

CHUNK_BYTES = 1 << 16


class Proxy:
    """Takes connections on a port of its own and carries them on to `port`, on loopback.

    What the target has refused is closed at once. `cut` ends connections with a reset; while `stalled` bytes stay where
    they are, in both directions, and both ends believe that they are connected.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._connections: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> "Proxy":
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def cut(self, chance: random.Random | None = None) -> bool:
        """Reset one of the connections, drawn by chance, or all. Returns whether there was any."""
        chosen = list(self._connections)
        if chance is not None and chosen:
            chosen = [chance.choice(chosen)]
        for pair in chosen:
            for writer in pair:
                writer.transport.abort()
        return bool(chosen)

    @contextlib.asynccontextmanager
    async def stalled(self) -> AsyncIterator[None]:
        self._flowing.clear()
        try:
            yield
        finally:
            self._flowing.set()

    async def close(self) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            onward = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, onward[1])
        self._connections.append(pair)
        try:
            ways = [self._pump(reader, onward[1]), self._pump(onward[0], writer)]
            await asyncio.wait(list(map(asyncio.ensure_future, ways)), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._connections.remove(pair)
            for end in pair:
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
