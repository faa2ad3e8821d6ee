"""`paged top`: what a scheduler does, live on a terminal; elsewhere one picture, or one object of JSON."""

import json
from collections import deque
from contextlib import aclosing

from rich.console import Console, RenderableType
from rich.live import Live

from paged.cli.answers import as_dict
from paged.cli.screen import screen
from paged.client import Client
from paged.v1 import control_pb2
from paged.watched import BlockStates

MAX_RATES = 500  # kept for the curve
MOST_REQUESTS = 100


class Seen:
    """All that one picture needs."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._states = BlockStates()
        self._rates: deque[float] = deque(maxlen=MAX_RATES)
        self._message = control_pb2.WatchResponse()

    def take(self, message: control_pb2.WatchResponse) -> None:
        self._states.apply(message)
        if message.HasField("rates"):
            self._rates.append(message.rates.generated_tokens_per_s)
        self._message = message

    def show(self, live: Live) -> None:
        """Now."""
        live.update(self._screen(live.console), refresh=True)

    def print(self, console: Console) -> None:
        console.print(self._screen(console))

    def as_json(self) -> str:
        """The last message, with all blocks instead of those that have changed: a number for each, as in BlockRun."""
        told = as_dict(self._message)
        for executor in told["executors"]:
            del executor["runs"]
            executor["blocks"] = list(self._states.of[executor["endpoint"]])
        return json.dumps(told)

    def _screen(self, console: Console) -> RenderableType:
        return screen(self._address, self._message, self._states, list(self._rates), console.width, console.height)


async def run(client: Client, address: str, period_ms: int, *, as_json: bool) -> None:
    """Until the stream ends, on a terminal; elsewhere until there are rates to show. Raises PagedClientError."""
    console, seen = Console(), Seen(address)
    is_live = console.is_terminal and not as_json
    async with aclosing(client.watch(period_ms=period_ms, max_requests=MOST_REQUESTS)) as messages:
        if is_live:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                async for message in messages:
                    seen.take(message)
                    seen.show(live)
            return
        async for message in messages:
            seen.take(message)
            if message.HasField("rates"):
                break
    if as_json:
        print(seen.as_json())
    else:
        seen.print(console)
