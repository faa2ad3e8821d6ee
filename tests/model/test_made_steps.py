"""Steps for measuring are what a step may be at most, and those for timing compute what they say."""

import itertools

import numpy as np
import pytest

from executor_svc.model.made_steps import everything, largest_step, make_step
from executor_svc.model.warm_up import Room, warm_up
from tests.model.conftest import BLOCK_SIZE, MAX_ROWS


@pytest.mark.parametrize(
    ("max_rows", "tokens_per_step", "max_model_len"),
    list(itertools.product([1, 3, 16], [17, 64, 1000], [1, 2, 50, 5000])),
)
def test_the_largest_step_has_all_rows_and_all_tokens_that_fit_them(max_rows, tokens_per_step, max_model_len):
    tokens = largest_step(max_rows, tokens_per_step, max_model_len)
    assert len(tokens) == max_rows
    assert sum(tokens) == min(tokens_per_step, max_rows * max_model_len)
    assert max(tokens) <= max_model_len
    assert sum(1 < count < max_model_len for count in tokens) <= 1


def test_rows_have_blocks_of_their_own_and_block_0_belongs_to_none():
    step = make_step([5, 1, 9], BLOCK_SIZE).step
    assert step.block_tables.min() > 0
    assert len(np.unique(step.slots)) == len(step.slots) == 15
    assert step.positions.tolist() == [*range(5), 0, *range(9)]
    assert step.context_lens.tolist() == [5, 1, 9]


def test_blocks_begin_anew_where_there_are_too_few():
    step = make_step([40, 40], BLOCK_SIZE, num_blocks=6, table_width=30).step
    assert set(np.unique(step.block_tables)) == set(range(6))  # 0 pads the tables
    assert step.block_tables.shape == (2, 30)
    assert step.slots.min() >= BLOCK_SIZE
    assert step.slots.max() < 6 * BLOCK_SIZE


@pytest.mark.parametrize("tokens", [[30, 1, 1], [1] * MAX_ROWS])
def test_a_step_with_everything_on_runs_and_leaves_no_row_behind(llama, tokens):
    runner = llama.loaded.runner
    output = make_step(tokens, BLOCK_SIZE, sampling=everything).run(runner)
    assert (output.sampled_ids >= 0).all()
    assert len(output.logprobs.ranks) == len(tokens)
    with pytest.raises(KeyError):
        runner.launch(make_step(tokens, BLOCK_SIZE).step).result()


def test_no_two_rows_share_what_rules_take_where_everything_is_measured():
    assert (
        len(
            {
                (start.sampling.biases, start.sampling.bias_ids)
                for start in make_step([1] * 256, BLOCK_SIZE, sampling=everything).starts
            }
        )
        == 256
    )


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize(
    "room",
    [Room(600, BLOCK_SIZE, MAX_ROWS, 32, 256), Room(3, BLOCK_SIZE, MAX_ROWS, 17, 8), Room(600, BLOCK_SIZE, 1, 2, 256)],
)
def test_warming_up_fits_into_any_room(llama, room, compiles):
    assert warm_up(llama.loaded.runner, room, compiles=compiles) >= 1
