"""Asks the worker whether a grammar can be used; ends the worker where that takes too long, and starts another."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from scheduler_svc.text.grammars import Grammar

ATTEMPTS = 2  # a worker may have died of something else than this grammar
STARVED = 30.0  # times as long as it may compute, the worker is waited for: it may get no CPU, or be frozen as we are
T = TypeVar("T")
DIED = "takes too much memory to compile; make it simpler"


async def to_its_end(work: Coroutine[Any, Any, T], give_up: Callable[[], None] | None = None) -> T:
    """The work's result. Who is cancelled meanwhile stays until the work has ended, however often that happens (a call
    ends by its deadline, and then by its client): what the work uses is nobody else's before."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if give_up is not None:
            give_up()
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        raise


class Starved(Exception):
    """The worker got no CPU to compile with: nobody knows what its grammar needs."""


class GrammarCheck:
    """One worker process, begun with the first grammar; one grammar at a time, the others wait. `limit_s` is of its
    CPU's time, so that no grammar is refused because the machine is busy.

    The pipes are read and written in a thread. The event loop's own subprocesses are forked with the handlers that gRPC
    has for a fork, which are not sound while its threads run; those of `subprocess` are not.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._worker: subprocess.Popen[bytes] | None = None
        self._turn = asyncio.Lock()
        self._given_up = False  # whether nobody waits for the grammar that is being tried
        self._is_starved = False  # whether it was ended for being late, and not for what it used

    async def problem_with(self, grammar: Grammar) -> str | None:
        """What is wrong with the grammar; None where it can be used. Raises Starved."""
        async with self._turn:
            self._given_up = False
            return await to_its_end(asyncio.to_thread(self._ask, grammar), self._give_up)

    def _give_up(self) -> None:
        self._given_up = True
        self._kill()  # its answer must not become the next one's

    def close(self) -> None:
        """End the worker."""
        self._given_up = True
        self._end_worker()

    def _ask(self, grammar: Grammar) -> str | None:
        fields = {"kind": grammar.kind, "source": grammar.source, "limit_s": self._limit_s}
        job = json.dumps(fields).encode() + b"\n"
        for _ in range(ATTEMPTS):
            self._is_starved = False
            timer = threading.Timer(self._starved_s, self._starve)
            timer.start()
            answer = self._answer(job)
            timer.cancel()
            if answer is not None:
                return answer["error"]
            died_of = self._end_worker()
            if self._given_up:
                break
            if died_of == -signal.SIGPROF:
                return f"takes more than {self._limit_s:g} s to compile; make it simpler"
            if self._is_starved:
                raise Starved(f"it got less than {self._limit_s:g} s of a CPU in {self._starved_s:g} s")
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
        if self._given_up:  # before there was one to be killed
            return None
        if worker.stdin is None or worker.stdout is None:
            raise RuntimeError("the grammar worker has no pipes")
        line = b""
        with suppress(OSError):
            worker.stdin.write(job)
            worker.stdin.flush()
            line = worker.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    def _end_worker(self) -> int | None:
        """Returns how it has ended, if there was one; whether it had ended already or not."""
        worker, self._worker = self._worker, None
        if worker is None:
            return None
        worker.kill()
        with worker:  # closes the pipes, and waits
            pass
        return worker.returncode

    @property
    def _starved_s(self) -> float:
        return STARVED * self._limit_s

    def _starve(self) -> None:
        self._is_starved = True
        self._kill()

    def _kill(self) -> None:
        worker = self._worker
        if worker is not None:
            worker.kill()
