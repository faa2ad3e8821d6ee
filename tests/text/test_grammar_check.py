"""Grammars are tried in a process of their own: what is wrong is told, and what is too much ends there."""

import asyncio
import signal
import threading

import pytest

from scheduler_svc.text.grammar_check import DIED, GrammarCheck, to_its_end
from scheduler_svc.text.grammars import Grammar

SLOW = Grammar("json_schema", '{"type": "integer", "multipleOf": 999983}')  # an automaton of a million states
GOOD = Grammar("regex", "a+")


@pytest.fixture
async def check():
    check = GrammarCheck(30)
    yield check
    check.close()


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (GOOD, None),
        (Grammar("choice", ("a", 'b"', "\n\\", "\x7f😀")), None),
        (Grammar("lark", 'start: "a"'), None),
        (Grammar("json_schema", "{}"), None),
        (Grammar("regex", "a("), "regex"),
        (Grammar("regex", "(?=a)a"), "regex"),
        (Grammar("regex", "(" * 5000 + "a" + ")" * 5000), "regex"),
        (Grammar("regex", r"x[^\s\S]"), "nothing can satisfy it"),
        (Grammar("regex", "()"), "nothing but the empty text"),
        (Grammar("json_schema", "{"), "EOF"),
        (Grammar("json_schema", "3"), "object"),
        (Grammar("json_schema", '{"type": "nope"}'), "nope"),
        (Grammar("json_schema", '{"enum": []}'), "Unsatisfiable"),
        (Grammar("json_schema", '{"type": "integer", "minimum": 5, "maximum": 4}'), "Unsatisfiable"),
        (Grammar("json_schema", '{"$ref": "#"}'), "nothing can satisfy it"),
        (Grammar("json_schema", '{"$ref": "http://127.0.0.1:9/x.json"}'), "not present"),
        (Grammar("json_schema", '{"$ref": "file:///etc/hostname"}'), "not present"),
        (Grammar("json_schema", nested(5000)), "recursion"),
        (Grammar("lark", "start: start"), "nothing can satisfy it"),
        (Grammar("lark", 'other: "a"'), "start"),
        (Grammar("lark", "start: " + "(" * 20000 + '"a"' + ")" * 20000), "nested"),
        (Grammar("lark", 'start: "a" <end>'), "special token"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_what_cannot_be_used_is_told(check, grammar, problem):
    found = await check.problem_with(grammar)
    assert found is None if problem is None else found is not None and problem in found


def chain(depth: int) -> Grammar:
    """Rules of which each begins with the next."""
    rules = "\n".join(f'r{i}: r{i + 1} "a"' for i in range(depth))
    return Grammar("lark", f'start: r0\n{rules}\nr{depth}: "x"')


async def test_what_is_refused_as_too_deep_leaves_a_thread_of_ours_far_from_the_end_of_its_stack(check):
    """The depth that the worker's process survives must be far below that at which a thread would take ours along."""
    assert await check.problem_with(chain(100)) is None
    assert await check.problem_with(chain(700)) == DIED


async def test_a_grammar_is_not_to_blame_for_a_worker_that_gets_no_time():
    check = GrammarCheck(0.3)
    assert await check.problem_with(GOOD) is None
    worker = check._worker
    worker.send_signal(signal.SIGSTOP)
    asyncio.get_running_loop().call_later(1.0, worker.send_signal, signal.SIGCONT)
    assert await check.problem_with(Grammar("regex", "b+")) is None
    assert check._worker is worker
    check.close()


async def test_what_takes_too_long_is_ended_and_the_next_is_looked_at_as_ever():
    check = GrammarCheck(0.6)
    assert await check.problem_with(GOOD) is None
    many = asyncio.gather(check.problem_with(SLOW), check.problem_with(GOOD))
    too_slow, good = await many
    assert too_slow is not None
    assert "takes more than 0.6 s" in too_slow
    assert good is None
    check.close()


async def test_a_worker_that_dies_idle_is_replaced_and_one_that_dies_over_a_grammar_ends_that_alone(check):
    assert await check.problem_with(GOOD) is None
    check._worker.kill()
    check._worker.wait()
    assert await check.problem_with(GOOD) is None
    asked = asyncio.ensure_future(check.problem_with(SLOW))
    killed = set()
    while not asked.done():
        await asyncio.sleep(0.01)
        if check._worker is not None and check._worker.pid not in killed:
            killed.add(check._worker.pid)
            check._worker.kill()
    assert "memory" in await asked
    assert len(killed) == 2, "tried once more"
    assert await check.problem_with(GOOD) is None


async def test_whoever_gives_up_leaves_no_answer_to_the_next(check):
    assert await check.problem_with(GOOD) is None
    asked = asyncio.ensure_future(check.problem_with(SLOW))
    while not check._turn.locked():
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    asked.cancel()
    await asyncio.wait([asked])
    assert asked.cancelled()
    assert await check.problem_with(GOOD) is None
    assert await check.problem_with(Grammar("regex", "a(")) is not None


async def test_who_gives_up_stays_until_the_work_has_ended_however_often_it_is_cancelled():
    """A call is cancelled by its deadline, and again as its client goes: its turn must not end before its work."""
    may_end, gave_up = threading.Event(), []
    asking = asyncio.create_task(to_its_end(asyncio.to_thread(may_end.wait, 20), lambda: gave_up.append(True)))
    for _ in range(3):
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.sleep(0)
    assert not asking.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert gave_up == [True]
