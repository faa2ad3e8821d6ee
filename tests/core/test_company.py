"""Those that run together: long prompts beside short ones, and whoever lacks blocks.

Budgets are 16 tokens a step, blocks are of 4.
"""

import pytest

from tests.core.run import Run, admitted, asked, assert_exact


class TestCompany:
    """C6.4 and C6.5."""

    def test_c6_4_those_that_decode_get_a_token_in_every_step_beside_a_long_prompt(self) -> None:
        run = Run(num_blocks=300, num_rows=8, tokens_per_step=16)
        short = [asked(name, 4, 60) for name in "abc"]
        for sequence in short:
            run.submit(sequence)
        run.step()
        run.submit(asked("long", 800, 2))
        for _ in range(40):
            before = [sequence.num_output for sequence in short]
            run.step()
            assert [sequence.num_output for sequence in short] == [count + 1 for count in before]
        run.to_the_end()

    def test_c6_4_short_prompts_behind_a_long_one_begin_as_soon_as_it_is_computed(self) -> None:
        run = Run(num_blocks=300, num_rows=8, tokens_per_step=16)
        run.submit(asked("long", 800, 2))
        short = [asked(f"s{i}", 4, 2) for i in range(20)]
        for sequence in short:
            run.submit(sequence)
        assert list(admitted(run, short)) == short
        assert len(run.plans) <= 800 // 16 + 20

    def test_c6_4_a_stream_of_short_prompts_does_not_starve_a_long_one(self) -> None:
        run = Run(num_blocks=300, num_rows=4, tokens_per_step=16)
        long, count = asked("long", 200, 2), 0
        for _ in range(4):
            run.submit(asked("first", 4, 8))
        run.submit(long)
        while long.num_output == 0:
            if run.scheduler.state.num_waiting < 4:
                run.submit(asked("short", 4, 8))
                count += 1
            run.step()
            assert len(run.plans) < 60
        run.to_the_end()

    def test_c6_4_small_ones_do_not_pass_a_large_one_that_lacks_blocks(self) -> None:
        run = Run(num_blocks=30)
        run.submit(asked("running", 60, 16))
        run.step()
        waiting = [asked("large", 76, 4), *(asked(f"s{i}", 3, 2) for i in range(5))]
        for sequence in waiting:
            run.submit(sequence)
        assert list(admitted(run, waiting)) == waiting

    @pytest.mark.parametrize("num_prompt", [36, 60])
    def test_c6_5_a_long_prompt_is_not_admitted_for_its_first_chunk_and_preempted_at_the_next(
        self, num_prompt: int
    ) -> None:
        run = Run(num_blocks=20, tokens_per_step=16)
        a, b = asked("a", 40, 40), asked("b", num_prompt, 20)
        run.submit(a)
        while a.num_output < 8:
            run.step()
        run.submit(b)
        run.to_the_end()
        assert_exact([a], a.token_ids[:40], 40)
        assert_exact([b], b.token_ids[:num_prompt], 20)
        assert run.scheduler.state.counters.preemptions <= 2
        least = 40 + 39 + num_prompt + 19
        assert run.num_computed < 1.5 * least

    def test_many_of_mixed_priorities_in_a_small_pool_all_end_without_much_done_twice(self) -> None:
        run = Run(num_blocks=40, num_rows=8, tokens_per_step=32)
        sequences = [
            asked(f"{i:03d}", 5 + 7 * i % 40, 4 + 11 * i % 30, priority=i * i % 4 - 1, tenant=f"t{i % 3}")
            for i in range(80)
        ]
        for i, sequence in enumerate(sequences):
            run.submit(sequence)
            if i % 3 == 0:
                run.step()
        run.to_the_end()
        for sequence in sequences:
            assert_exact([sequence], sequence.token_ids[: sequence.num_prompt], sequence.max_tokens)
        least = sum(len(sequence.token_ids) - 1 for sequence in sequences)
        assert run.num_computed < 3 * least
        assert run.scheduler.state.counters.preemptions < 2 * len(sequences)
