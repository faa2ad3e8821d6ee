"""One tenant's grammars hold up its own requests, and nobody waits for a compilation without a bound."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from scheduler_svc.core.sequence import Sampling
from scheduler_svc.engine import Engine
from scheduler_svc.errors import PagedError, QueueFull, RequestAborted, Unavailable
from scheduler_svc.grammar_queue import GrammarQueue
from scheduler_svc.requests import GenerationRequest
from scheduler_svc.text import grammar_check
from scheduler_svc.text.grammars import Grammar, Grammars, UnusableGrammar
from tests.overload.test_wait_limit import engine_of, until
from tests.system.engines import samples_ids
from tests.text.test_grammar_check import GOOD, SLOW

MODEL = cast(Grammars, "a model")
SOON_S = 30.0


class Compiler:
    """Writes down whose turn it is, and compiles for as long as it is told."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.may_end = asyncio.Event()
        self.is_busy = False

    async def __call__(self, _grammars: Grammars, grammar: Grammar) -> None:
        assert not self.is_busy, "one at a time"
        self.is_busy = True
        self.begun.append(str(grammar.source))
        try:
            await self.may_end.wait()
        finally:
            self.is_busy = False
        if grammar.source == "bad":
            raise UnusableGrammar("it is bad")


def queue_of(compiler: Callable[[Grammars, Grammar], Awaitable[None]], most: int = 100, own: int = 100) -> GrammarQueue:
    return GrammarQueue(compiler, most, own)


def waits(queue: GrammarQueue, tenant: str, source: str) -> asyncio.Task[None]:
    return asyncio.create_task(queue.compiled(tenant, MODEL, Grammar("regex", source)))


async def turns(count: int = 5) -> None:
    """Of the event loop."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_tenants_take_turns_however_many_one_of_them_has() -> None:
    compiler = Compiler()
    queue = queue_of(compiler)
    tasks = [waits(queue, "greedy", f"g{number}") for number in range(4)]
    await turns()
    tasks += [waits(queue, "modest", "m0"), waits(queue, "modest", "m1"), waits(queue, "third", "t0")]
    await turns()
    compiler.may_end.set()
    await asyncio.wait_for(asyncio.gather(*tasks), SOON_S)
    assert compiler.begun == ["g0", "g1", "m0", "t0", "g2", "m1", "g3"]


async def test_so_many_wait_of_a_tenant_and_in_all_and_the_refusal_names_the_limit() -> None:
    compiler = Compiler()
    queue = queue_of(compiler, most=3, own=2)
    tasks = [waits(queue, "a", "first")]
    await turns()
    tasks += [waits(queue, "a", "a1"), waits(queue, "a", "a2")]
    await turns()
    with pytest.raises(QueueFull, match=r"2 grammars of the tenant wait.* max_tenant_waiting_grammars") as caught:
        await waits(queue, "a", "a3")
    assert caught.value.retry_after_s
    tasks += [waits(queue, "a", "a2"), waits(queue, "b", "b1")]  # the first waits for what waits already
    await turns()
    with pytest.raises(QueueFull, match=r"3 grammars wait.* max_waiting_grammars"):
        await waits(queue, "c", "c1")
    compiler.may_end.set()
    await asyncio.wait_for(asyncio.gather(*tasks), SOON_S)
    assert sorted(compiler.begun) == ["a1", "a2", "b1", "first"], "each once"
    await waits(queue, "c", "c1")


async def test_who_is_cancelled_leaves_at_once_and_what_nobody_waits_for_is_given_up() -> None:
    compiler = Compiler()
    queue = queue_of(compiler)
    current, shared, also, lonely, last = (
        waits(queue, "a", source) for source in ("current", "shared", "shared", "lonely", "last")
    )
    await turns()
    for task in (shared, lonely, current):
        task.cancel()
    await asyncio.wait([shared, lonely, current], timeout=SOON_S)
    assert all(task.cancelled() for task in (shared, lonely, current))
    await until(lambda: len(compiler.begun) == 2)
    compiler.may_end.set()
    await asyncio.wait_for(asyncio.gather(also, last), SOON_S)
    assert compiler.begun == ["current", "shared", "last"]


async def test_what_is_wrong_with_a_grammar_is_told_to_all_who_wait_for_it_and_to_nobody_else() -> None:
    compiler = Compiler()
    queue = queue_of(compiler)
    bad, also, good = waits(queue, "a", "bad"), waits(queue, "a", "bad"), waits(queue, "a", "good")
    await turns()
    compiler.may_end.set()
    for task in (bad, also):
        with pytest.raises(UnusableGrammar, match="it is bad"):
            await asyncio.wait_for(task, SOON_S)
    await asyncio.wait_for(good, SOON_S)


def asking(engine: Engine, name: str, grammar: Grammar) -> asyncio.Task[Any]:
    asked = GenerationRequest(name, [300] * 8, Sampling(temperature=0.0), max_tokens=4, grammar=grammar)
    return asyncio.create_task(samples_ids(engine, asked))


@pytest.mark.parametrize("how", ["max_wait_s", "abort"])
async def test_a_request_whose_grammar_is_compiled_ends_like_any_that_waits(how: str, tmp_path: Path) -> None:
    async with engine_of(tmp_path, max_wait_s=3600.0, max_grammar_s=60.0) as (engine, _):
        assert await asking(engine, "first", GOOD)
        slow = asking(engine, "slow", SLOW)
        await until(lambda: "slow" in engine.lives.samples)
        kind: type[PagedError]
        if how == "abort":
            assert engine.abort(["slow"]) == ["slow"]
            kind, reason = RequestAborted, "through the control service"
        else:
            engine.lives.end_waits(asyncio.get_running_loop().time() + 3600.0)
            kind, reason = QueueFull, "has waited for max_wait_s"
        with pytest.raises(kind, match=reason):
            await asyncio.wait_for(slow, SOON_S)
        assert await asyncio.wait_for(asking(engine, "next", Grammar("regex", "b+")), SOON_S)


async def test_a_worker_that_gets_no_cpu_is_no_fault_of_the_grammar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "STARVED", 1.0)
    async with engine_of(tmp_path, max_grammar_s=2.0) as (engine, _):
        assert await asking(engine, "first", GOOD)
        worker = engine.lives.masks._check._worker
        assert worker is not None
        worker.send_signal(signal.SIGSTOP)
        with pytest.raises(Unavailable, match="less than 2 s of a CPU in 2 s; try again"):
            await asyncio.wait_for(asking(engine, "frozen", Grammar("regex", "b+")), SOON_S)
        monkeypatch.setattr(grammar_check, "STARVED", 30.0)
        assert await asking(engine, "next", Grammar("regex", "b+"))
