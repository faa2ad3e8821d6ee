"""What those who look on see of each block is what the books say, and changes alone are enough to know it."""

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from scheduler_svc.core.block_states import BLANK, CACHED, HELD_BY_NONE, NOT_LENT, block_states, changed_runs
from scheduler_svc.core.prefix import prefix_hashes, root_hash
from scheduler_svc.core.prefix_tree import prefix_tree
from scheduler_svc.core.sequence import Sampling, Sequence
from tests.core.run import BLOCK_SIZE, Run


def samples(prompt: list[int], num: int, max_tokens: int) -> Sequence:
    members = [Sequence(f"r{prompt[0]}", prompt, max_tokens, sampling=Sampling(index=i)) for i in range(num)]
    members[0].held = members[1:]
    return members[0]


def test_states_are_what_the_books_say_and_changes_add_up_to_them() -> None:
    chance = random.Random(1)
    run = Run(num_blocks=40, num_rows=6)
    stem = list(range(100, 100 + 3 * BLOCK_SIZE))
    told = np.zeros(0, np.uint8)
    seen: Counter[int] = Counter()
    for number in range(60):
        if number % 3 == 0:
            prompt = stem[: chance.randrange(0, len(stem))] + [number] * chance.randrange(1, 6)
            run.submit(samples(prompt, chance.choice([1, 1, 3]), chance.randrange(1, 12)))
        run.step()
        pool, columns = run.scheduler.state.cache.pool, run.scheduler.state.columns
        tables = Counter(block for row in columns.running_rows().tolist() for block in columns.table(row))
        states = block_states(run.scheduler.state)
        for block, state in enumerate(states.tolist()):
            if block not in pool.leased:
                assert state == NOT_LENT
            elif block in pool.cached:
                assert state == CACHED
            else:
                assert state == (HELD_BY_NONE + tables[block] if tables[block] else BLANK)
        column = np.zeros(len(states), np.uint8)
        column[: len(told)] = told
        for begin, changed in changed_runs(told, states):
            column[begin : begin + len(changed)] = list(changed)
        assert column.tolist() == states.tolist()
        assert changed_runs(states, states) == []
        told = states
        seen.update(states.tolist())
    assert {NOT_LENT, BLANK, CACHED, HELD_BY_NONE + 1, HELD_BY_NONE + 3} <= seen.keys()  # all of it was met


def test_a_block_of_more_tables_than_a_byte_can_say_is_at_the_most() -> None:
    run = Run(num_blocks=600, num_rows=300, tokens_per_step=600)
    run.submit(samples([1] * BLOCK_SIZE, 280, 8))
    run.step()
    assert block_states(run.scheduler.state).max() == 255


@pytest.mark.parametrize(
    ("changed", "runs"),
    [([], []), ([3], [(3, 1)]), ([3, 4, 10], [(3, 8)]), ([3, 40, 41, 99], [(3, 1), (40, 2), (99, 1)])],
)
def test_changes_that_are_close_are_one_run(changed: list[int], runs: list[tuple[int, int]]) -> None:
    after = np.ones(100, np.uint8)
    after[changed] = 7
    assert [(begin, len(states)) for begin, states in changed_runs(np.ones(100, np.uint8), after)] == runs


class TestPrefixTree:
    def tree(self, run: Run, most: int = 1000) -> list[tuple[bytes, int, int, int]]:
        cache = run.scheduler.state.cache
        nodes = prefix_tree(cache.links(), most)
        assert all(cache.find([node.digest]) == [node.block] for node in nodes)
        return [(node.digest, node.parent, node.depth, node.count) for node in nodes]

    def test_prompts_that_begin_alike_are_branches_of_one_stem_the_larger_first(self) -> None:
        run = Run()
        stem, root = [7] * 2 * BLOCK_SIZE, root_hash()
        alone, short, long = [9] * (BLOCK_SIZE + 1), stem + [1] * (BLOCK_SIZE + 1), stem + [2] * (3 * BLOCK_SIZE + 1)
        for prompt in (alone, short, long):
            run.answer(prompt, 1)
        a, b = prefix_hashes(stem, BLOCK_SIZE, root)
        (c,) = prefix_hashes(short, BLOCK_SIZE, root)[2:]
        d, e, f = prefix_hashes(long, BLOCK_SIZE, root)[2:]
        (g,) = prefix_hashes(alone, BLOCK_SIZE, root)
        whole = [(a, -1, 0, 0), (b, 0, 1, 0), (d, 1, 2, 0), (e, 2, 3, 0), (f, 3, 4, 0), (c, 1, 2, 0), (g, -1, 0, 0)]
        assert self.tree(run) == whole
        assert self.tree(run, 3) == whole[:3]

    def test_what_is_used_is_counted_and_outputs_hang_on_their_prompts(self) -> None:
        run = Run()
        first = run.submit(samples([5] * 2 * BLOCK_SIZE, 2, 3 * BLOCK_SIZE))
        while first.num_output < BLOCK_SIZE + 1:
            run.step()
        assert [(parent, depth, count) for _, parent, depth, count in self.tree(run)][:3] == [
            (-1, 0, 2),
            (0, 1, 2),
            (1, 2, 1),
        ]

    def test_what_has_lost_its_beginning_is_a_root_and_a_flush_leaves_none(self) -> None:
        run = Run(num_blocks=8)
        prompt = [3] * (4 * BLOCK_SIZE + 1)
        run.answer(prompt, 1)
        hashes = prefix_hashes(prompt, BLOCK_SIZE, root_hash())
        run.scheduler.state.cache.withdraw(hashes[1:2])
        assert self.tree(run) == [(hashes[2], -1, 0, 0), (hashes[3], 0, 1, 0), (hashes[0], -1, 0, 0)]
        run.scheduler.flush_prefix_cache()
        assert self.tree(run) == []

    def test_blocks_that_are_used_again_forget_what_they_continued(self) -> None:
        run, chance = Run(num_blocks=12), random.Random(2)
        above: dict[bytes, bytes] = {}
        for number in range(40):
            sequence = run.answer([number % 5] * chance.randrange(1, 5 * BLOCK_SIZE), chance.randrange(1, 9))
            hashes = prefix_hashes(sequence.token_ids, BLOCK_SIZE, root_hash())
            above.update(pairwise(reversed(hashes)))
            nodes = self.tree(run)
            assert len(nodes) == len(run.scheduler.state.cache)
            for digest, parent, _, _ in nodes:
                assert parent < 0 or nodes[parent][0] == above[digest]
