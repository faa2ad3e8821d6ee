"""Answers are compared request by request, one at a time, and paging's tables are no runs of blocks."""

import pytest

from benchmarks.claims import answers
from benchmarks.claims.paper import Paper
from benchmarks.claims.requests import Mix
from benchmarks.claims.served import Executor
from benchmarks.claims.setting import Say, Setting
from benchmarks.claims.slabs import POLICIES

MIXES = (Mix("some", ((40, 9), (130, 70), (7, 3))), Mix("others", ((20, 5),)))
FLAGS = ["--simulate", "--num-blocks", "65", "--tokens-per-step", "128", "--max-rows", "32"]


def _setting(vocab_size: int, say: Say = lambda text: None) -> Setting:
    return Setting(
        mixes=MIXES,
        vocab_size=vocab_size,
        longest=256,
        kv_tokens=1024,
        window_s=0.0,
        num_plans=0,
        quick=False,
        say=say,
    )


async def test_every_policy_gives_the_same_answers() -> None:
    told: list[str] = []
    async with Executor.started(FLAGS) as executor:
        found = await answers.measure(_setting(executor.lease.vocab_size, told.append), executor)
    assert found["requests"] == answers.REQUESTS * len(MIXES)
    assert found["tokens"] == 9 + answers.MOST_OUTPUT + 3 + 3 * 5
    assert found["distinct_tokens"] > 1
    assert found["differing"] == {"slab_max": 0, "slab_pow2": 0, "slab_oracle": 0}
    assert "that differ from paged: {'slab_max': 0" in told[0]


def test_one_token_more_or_another_one_is_another_answer() -> None:
    assert answers.differing([[1, 2], [3], [4, 5]], [[1, 2], [3, 3], [5, 4]]) == 2


@pytest.mark.parametrize(("name", "in_a_row"), [("paged", False), *((name, True) for name in list(POLICIES)[1:])])
def test_only_slabs_are_blocks_in_a_row(name: str, in_a_row: bool) -> None:
    setting = _setting(100)
    scheduler = answers.scheduler_of(setting, POLICIES[name])
    Paper(scheduler, setting.lease(), setting.backlog(MIXES[0]))
    scheduler.submit(setting.source(Mix("one", ((200, 9),))).next(0.0))
    plan = scheduler.plan()
    assert plan is not None
    (blocks,) = (started.blocks for started in plan.started)
    assert (blocks == list(range(blocks[0], blocks[0] + len(blocks)))) is in_a_row
    assert set(blocks) <= set(range(1, setting.num_blocks + 1))
