"""What is found again, by whom, and what a follower of the cache is told."""

import itertools
import random

import pytest

from scheduler_svc.core.cache_events import CLEARED, REMOVED, STORED, CacheEvents, TooManyFollowers
from scheduler_svc.core.prefix import root_hash
from scheduler_svc.core.scheduler import NeverFits
from scheduler_svc.core.sequence import Sequence, State
from tests.core.plain_executor import continuation
from tests.core.run import Run, assert_exact

PROMPT = list(range(32))


class TestWhoFindsWhat:
    @pytest.mark.parametrize(
        "pair",
        [
            ({"salt": "x"}, {"keys": "x"}),
            ({"salt": "ab", "keys": "c"}, {"salt": "a", "keys": "bc"}),
            ({"salt": "x"}, {}),
            ({"salt": "a\0b"}, {"salt": "a"}),
            ({"salt": "é"}, {"salt": "e\u0301"}),
            ({"salt": "1:a"}, {"salt": "a"}),
        ],
    )
    def test_c2_1_keys_of_different_meaning_never_come_to_the_same_hash(self, pair: tuple[dict, dict]) -> None:
        assert root_hash(**pair[0]) != root_hash(**pair[1])

    def test_c2_1_an_empty_salt_is_none(self) -> None:
        assert root_hash(salt="") == root_hash()

    @pytest.mark.parametrize("salt", ["x", "x\0", "é", "x" * 256])
    def test_c2_1_c2_5_a_prefix_is_found_with_its_own_salt_alone(self, salt: str) -> None:
        """What a request with another salt is told, and the steps it takes, are those of an empty cache."""
        run = Run()
        cold = run.answer(PROMPT, 4, tenant="a", cache_salt=salt)
        num_cold = len(run.plans)
        assert cold.num_cached == 0
        for other in ("", "y", salt + "y"):
            before = len(run.plans)
            assert run.answer(PROMPT, 4, tenant="b", cache_salt=other).num_cached == 0
            assert len(run.plans) - before == num_cold
        # Whose request it is does not matter, only its salt.
        assert run.answer(PROMPT, 4, tenant="b", cache_salt=salt).num_cached == 28

    def test_a_bypass_neither_finds_nor_leaves_anything(self) -> None:
        run = Run()
        assert run.answer(PROMPT, 4, bypass_cache=True).num_cached == 0
        assert len(run.scheduler.state.cache) == 0
        run.answer(PROMPT, 4)
        assert run.answer(PROMPT, 4, bypass_cache=True).num_cached == 0
        assert run.answer(PROMPT, 4).num_cached == 28

    @pytest.mark.parametrize("when", range(1, 6))
    def test_a_flush_forgets_what_was_computed_before_it_and_disturbs_nobody(self, when: int) -> None:
        run = Run(tokens_per_step=10)
        running = run.submit(Sequence("r", list(PROMPT), 8))
        for _ in range(when):
            run.step()
        run.scheduler.flush_prefix_cache()
        assert run.scheduler.state.cache.pool.num_cached == 0
        late = run.answer(PROMPT, 8)
        run.to_the_end()
        assert late.num_cached == 0
        assert_exact([running, late], PROMPT, 8)


class TestWholePromptCached:
    @pytest.mark.parametrize("block_size", [1, 4])
    @pytest.mark.parametrize("num_prompt", [4, 8, 16])
    def test_c2_2_the_last_token_of_a_prompt_is_always_computed(self, num_prompt: int, block_size: int) -> None:
        run = Run(num_blocks=200, block_size=block_size)
        for times in range(3):
            answer = run.answer(PROMPT[:num_prompt], 1)
            assert_exact([answer], PROMPT[:num_prompt], 1)
            assert answer.num_cached == (num_prompt - block_size if times else 0)

    def test_c2_2_a_prompt_that_is_the_prompt_and_output_of_another(self) -> None:
        run = Run()
        prompt = run.answer(PROMPT[:10], 9).token_ids[:16]
        answer = run.answer(prompt, 3)
        assert answer.num_cached == 12
        assert_exact([answer], prompt, 3)

    def test_c2_2_a_shared_block_is_not_written_while_another_holds_it(self) -> None:
        run = Run()
        first = run.submit(Sequence("r", PROMPT[:16], 12))
        for _ in range(3):
            run.step()
        second = run.submit(Sequence("r", PROMPT[:16], 12))
        run.to_the_end()  # every rule is checked after each step
        assert second.num_cached == 12
        assert_exact([first, second], PROMPT[:16], 12)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_c2_3_recycled_blocks_are_never_found_for_what_they_held(prefix_caching: bool) -> None:
    chance = random.Random(5)
    prompts = [[i, *range(23)] if i % 3 else [9] * 12 + [i] * 12 for i in range(10)]
    run = Run(num_blocks=12, num_rows=3, prefix_caching=prefix_caching)
    wanted: list[tuple[Sequence, int]] = []
    for _ in range(300):
        max_tokens = chance.randint(1, 8)
        wanted.append((run.submit(Sequence("r", list(chance.choice(prompts)), max_tokens)), max_tokens))
        for _ in range(chance.randrange(4)):
            run.step()
        if chance.random() < 0.2:
            run.scheduler.cancel(chance.choice(wanted)[0])
    run.to_the_end()
    for sequence, max_tokens in wanted:
        expected = continuation(sequence.token_ids[:24], (), 24 + max_tokens)
        output = sequence.token_ids[24:]
        assert output == expected[: len(output)]
        assert len(output) == max_tokens or sequence.end_reason is None, "neither whole nor cancelled"
    assert (run.scheduler.state.counters.cached_prompt_tokens > 0) == prefix_caching


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("chunked", [False, True])
def test_c1_4_blocks_are_as_many_as_the_computed_positions_need(block_size: int, chunked: bool) -> None:
    """The newest token has no K/V yet, and needs no slot."""
    lengths = {max(1, block_size + d) for d in (-1, 0, 1)} | {2 * block_size + d for d in (-1, 0, 1)}
    outputs = {1, max(1, block_size - 1), block_size, block_size + 1}
    for num_prompt, max_tokens in itertools.product(sorted(lengths), sorted(outputs)):
        budget = block_size if chunked else 200
        run = Run(num_blocks=60, block_size=block_size, tokens_per_step=budget, num_rows=1)
        prompt = list(range(num_prompt))
        sequence = run.submit(Sequence("r", list(prompt), max_tokens))
        while sequence.state is not State.ENDED:
            plan = run.scheduler.plan()
            assert plan is not None
            columns = run.scheduler.state.columns
            computed, held = int(columns.num_computed[sequence.row]), int(columns.num_blocks[sequence.row])
            most = max(num_prompt, computed)  # a prompt has all its blocks from the first chunk on
            assert held == -(-most // block_size)
            run.scheduler.apply(run.executor.run(plan))
        assert_exact([sequence], prompt, max_tokens)
        assert run.scheduler.state.cache.pool.num_used == 0


class TestOutOfBlocks:
    def test_c1_1_cancelling_what_was_never_scheduled_touches_nobody(self) -> None:
        run = Run(num_rows=1)
        a, b, c = (Sequence(name, [i] * 5, 20) for i, name in enumerate("abc"))
        run.submit(a)
        run.step()
        run.submit(b)
        run.submit(c)
        run.scheduler.cancel(b)
        run.scheduler.cancel(b)
        new = Sequence("never submitted", [1], 1)
        run.scheduler.cancel(new)
        run.to_the_end()
        assert (b.state, b.num_output, new.num_output) == (State.ENDED, 0, 0)
        assert_exact([a], [0] * 5, 20)
        assert_exact([c], [2] * 5, 20)

    def test_c1_2_what_outgrows_the_pool_alone_is_refused_or_ends_with_what_fits(self) -> None:
        run = Run(num_blocks=6)
        with pytest.raises(NeverFits):
            run.submit(Sequence("r", list(range(20)), 40))
        stuck = run.submit(Sequence("r", list(range(20))))
        for _ in range(3):
            run.step()
        small = run.submit(Sequence("s", [7] * 3, 3))
        run.to_the_end()
        assert stuck.num_output == 6 * 4 + 1 - 20
        assert_exact([small], [7] * 3, 3)
        assert run.scheduler.state.counters.preemptions == 0
        assert len(run.plans) < 15

    def test_c1_2_two_that_outgrow_the_pool_together_end_in_bounded_steps(self) -> None:
        run = Run(num_blocks=10)
        both = [run.submit(Sequence("r", [i] * 10, 25)) for i in range(2)]
        run.to_the_end()
        for i, sequence in enumerate(both):
            assert_exact([sequence], [i] * 10, 25)
        assert run.scheduler.state.counters.preemptions <= 2
        assert run.num_computed < 1.5 * 2 * 34


class TestFollowers:
    def test_a_follower_is_told_first_what_is_cached_and_then_each_change(self) -> None:
        events = CacheEvents()
        run = Run(num_blocks=8, cache_events=events)
        run.answer(PROMPT[:9], 2)
        follower = events.follow(lambda: None)
        first = follower.take(100)
        assert first is not None
        assert first.starts_anew
        assert [kind for kind, _ in first.events] == [STORED] * 2
        assert follower.take(100) is None
        run.answer([40] * 26, 2)
        told = follower.take(100)
        assert told is not None
        cached = {digest for _, digest in first.events}
        for kind, digest in told.events:
            cached = cached | {digest} if kind == STORED else cached - {digest}
        assert cached == set(events.hashes)
        assert REMOVED in [kind for kind, _ in told.events], "the pool was meant to be too small"
        assert told.number == first.number + len(told.events)
        run.scheduler.flush_prefix_cache()
        told = follower.take(100)
        assert told is not None
        assert told.events == [(CLEARED, b"")]

    def test_a_follower_that_is_too_slow_is_told_how_much_it_missed_and_starts_anew(self) -> None:
        events = CacheEvents(max_waiting=3)
        follower = events.follow(lambda: None)
        follower.take(10)
        for i in range(5):
            events.add(STORED, bytes([i]))
        events.hashes = [b"present"]
        told = follower.take(10)
        assert told is not None
        assert (told.starts_anew, told.num_missed, told.number) == (True, 5, 5)
        assert told.events == [(STORED, b"present")]
        events.add(REMOVED, b"present")
        told = follower.take(10)
        assert told is not None
        assert (told.starts_anew, told.number, told.events) == (False, 6, [(REMOVED, b"present")])

    def test_events_in_parts_are_numbered_by_their_last(self) -> None:
        events = CacheEvents()
        follower = events.follow(lambda: None)
        follower.take(10)
        for i in range(5):
            events.add(STORED, bytes([i]))
        parts = [follower.take(2) for _ in range(3)]
        assert [(part.number, len(part.events)) for part in parts if part] == [(2, 2), (4, 2), (5, 1)]

    def test_the_number_of_followers_is_bounded_and_who_leaves_makes_room(self) -> None:
        events = CacheEvents(max_followers=1)
        follower = events.follow(lambda: None)
        with pytest.raises(TooManyFollowers):
            events.follow(lambda: None)
        follower.close()
        events.follow(lambda: None)
