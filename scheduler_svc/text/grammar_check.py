"""Asks the worker whether a grammar can be used; ends the worker where that takes too long, and starts another."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from scheduler_svc.text.grammars import Grammar

ATTEMPTS = 2  # a worker may have died of something else than this grammar
DIED = "takes too much memory to compile; make it simpler"


class GrammarCheck:
    """One worker process, begun with the first grammar; one grammar at a time, the others wait.

    The pipes are read and written in a thread. The event loop's own subprocesses are forked with the handlers that gRPC
    has for a fork, which are not sound while its threads run; those of `subprocess` are not.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._worker: subprocess.Popen[bytes] | None = None
        self._turn = asyncio.Lock()
        self._given_up = False  # whether nobody waits for the grammar that is being tried

    async def problem_with(self, grammar: Grammar) -> str | None:
        """What is wrong with the grammar; None where it can be used."""
        async with self._turn:
            self._given_up = False
            asking = asyncio.ensure_future(asyncio.to_thread(self._ask, grammar))
            try:
                return await asyncio.shield(asking)
            except asyncio.CancelledError:
                self._given_up = True
                self._kill()  # its answer must not become the next one's
                await asyncio.wait([asking])
                raise

    def close(self) -> None:
        """End the worker."""
        self._given_up = True
        self._end_worker()

    def _ask(self, grammar: Grammar) -> str | None:
        job = json.dumps({"kind": grammar.kind, "source": grammar.source}).encode() + b"\n"
        for _ in range(ATTEMPTS):
            begin = time.monotonic()
            timer = threading.Timer(self._limit_s, self._kill)
            timer.start()
            answer = self._answer(job)
            timer.cancel()
            if answer is not None:
                return answer["error"]
            self._end_worker()
            if self._given_up:
                break
            if time.monotonic() - begin >= self._limit_s:
                return f"takes more than {self._limit_s:g} s to compile; make it simpler"
        return DIED

    def _answer(self, job: bytes) -> dict[str, Any] | None:
        """None where the worker dies over it."""
        if self._worker is None or self._worker.poll() is not None:
            self._worker = subprocess.Popen(
                [sys.executable, "-m", "scheduler_svc.text.grammar_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # may quote a request
            )
        worker = self._worker
        if worker.stdin is None or worker.stdout is None:
            raise RuntimeError("the grammar worker has no pipes")
        line = b""
        with suppress(OSError):
            worker.stdin.write(job)
            worker.stdin.flush()
            line = worker.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
            with worker:  # closes the pipes, and waits
                pass

    def _kill(self) -> None:
        worker = self._worker
        if worker is not None:
            worker.kill()
