"""A load in a process of its own, so that reading does not take the time of whoever measures.

`python -m paged.load.process` is given a line of JSON on stdin (the fields of `Load`), says "warm" on stdout once every
stream has had a token, begins its window at the line "begin", and at the line "end" says what was seen in it, as JSON
(the fields of `Seen`).
"""

import asyncio
import gc
import json
import sys
from collections.abc import Coroutine
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import grpc.aio

from paged.channel import channel_options
from paged.load.generator import Load, LoadGenerator

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
YOUNG_OBJECTS = 20_000  # before Python's collector looks at them: what a few messages bring is more than its 700


def run(work: Coroutine[Any, Any, None]) -> None:
    """In the fastest event loop that is installed."""
    gc.set_threshold(YOUNG_OBJECTS)
    if find_spec("uvloop") is not None:  # a third more messages; not a dependency of clients
        import uvloop

        uvloop.run(work)
    else:
        asyncio.run(work)


async def _serve() -> None:
    reader = asyncio.StreamReader(limit=1 << 20)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    load = Load(**json.loads(await reader.readline()))
    async with (
        grpc.aio.insecure_channel(load.target, options=channel_options(MAX_MESSAGE_BYTES)) as channel,
        LoadGenerator(load, channel) as generator,
    ):
        await generator.warmed_up()
        print("warm", flush=True)
        await _line(reader, "begin")
        generator.begin()
        if load.once:
            await generator.finished()
        await _line(reader, "end")
        print(json.dumps(asdict(generator.end())), flush=True)


async def _line(reader: asyncio.StreamReader, due: str) -> None:
    if (line := (await reader.readline()).decode().strip()) != due:
        raise SystemExit(f"{line!r} came where {due!r} was due")


if __name__ == "__main__":
    run(_serve())
