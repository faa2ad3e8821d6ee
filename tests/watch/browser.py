"""A headless Chromium, told what to do over its own protocol (https://chromedevtools.github.io/devtools-protocol)."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WAIT_S = 30.0
CLOSING = 0  # number of the last message
FLAGS = (
    *("--headless=new", "--remote-debugging-port=0", "--no-first-run", "--disable-gpu", "--disable-extensions"),
    *("--disable-dev-shm-usage", "--disable-background-networking", "--hide-scrollbars", "--no-proxy-server"),
)


def find_browser() -> str | None:
    """The command of one that is installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. `problems` is what its console has complained about."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session = ""
        self.problems: list[str] = []

    async def open(self, url: str, width: int = 1280, height: int = 860) -> Self:
        target = await self.tell("Target.createTarget", url="about:blank")
        attached = await self.tell("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.tell(f"{domain}.enable")
        await self.tell(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await self.tell("Page.navigate", url=url)
        is_there = f"location.href === {json.dumps(url)} && document.readyState === 'complete'"
        async with asyncio.timeout(WAIT_S):  # where it was before may go while it is asked
            while True:
                found = await self._ask("Runtime.evaluate", expression=is_there)
                if "error" not in found and found["result"]["result"].get("value"):
                    return self
                await asyncio.sleep(0.02)

    async def tell(self, method: str, **parameters: object) -> dict[str, Any]:
        found = await self._ask(method, **parameters)
        assert "error" not in found, (method, found)
        return found["result"]

    async def _ask(self, method: str, **parameters: object) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters}
        await self._socket.send_json(message | ({"sessionId": self._session} if self._session else {}))
        return await asyncio.wait_for(answer, WAIT_S)

    async def listen(self) -> None:
        async for message in self._socket:
            heard = json.loads(message.data)
            if heard.get("id") == CLOSING:
                return
            if "id" in heard:
                self._answers.pop(heard["id"]).set_result(heard)
            elif heard["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(heard["params"]["exceptionDetails"]))
            elif heard["method"] == "Log.entryAdded" and heard["params"]["entry"]["level"] == "error":
                self.problems.append(heard["params"]["entry"]["text"])

    async def value(self, expression: str) -> Any:
        found = await self.tell("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str) -> Any:
        """The first value that is true."""
        async with asyncio.timeout(WAIT_S):
            while not (value := await self.value(expression)):
                await asyncio.sleep(0.02)
        return value

    async def move_to(self, x: float, y: float) -> None:
        await self.tell("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def picture(self, file: Path) -> None:
        found = await self.tell("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(found["data"]))


@contextlib.asynccontextmanager
async def browsing(directory: Path, *flags: str) -> AsyncIterator[Page]:
    """A new browser, with nothing of any other. Ends with it."""
    command = find_browser()
    assert command is not None
    alone = ("--no-sandbox",) if os.geteuid() == 0 else ()  # it refuses root otherwise
    process = await asyncio.create_subprocess_exec(
        *(command, *FLAGS, *alone, *flags, f"--user-data-dir={directory}", "about:blank"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        port_file = directory / "DevToolsActivePort"
        async with asyncio.timeout(WAIT_S):
            while not port_file.exists() or len(port_file.read_text().split()) < 2:
                assert process.returncode is None, "the browser has ended"
                await asyncio.sleep(0.02)
        port, path = port_file.read_text().split()
        url = f"ws://127.0.0.1:{port}{path}"
        async with aiohttp.ClientSession() as http, http.ws_connect(url, max_msg_size=1 << 26) as socket:
            page = Page(socket)
            listening = asyncio.create_task(page.listen())
            try:
                yield page
            finally:
                with contextlib.suppress(ConnectionError, TimeoutError):
                    await socket.send_json({"id": CLOSING, "method": "Browser.close"})
                    await asyncio.wait_for(process.wait(), 5)
                listening.cancel()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
