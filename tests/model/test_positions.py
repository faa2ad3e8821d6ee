"""Learned positions are right from the first to the last place of their table, whatever the row and its beginning."""

import pytest

from executor_svc.plan import PlanViolation
from tests.model.conftest import BLOCK_SIZE, MAX_ROWS, Model, random_ids
from tests.model.driver import Driver
from tests.model.families import SERVED, tiny_config
from tests.model.test_margin import assert_margin, drawn, greedy
from tests.tiny_models import save_model

MOST = 64
# The tables of BioGPT and OPT begin with two places that are no position.
FAMILIES = ["bert", "biogpt", "gpt2", "gpt_bigcode", "opt"]


@pytest.fixture(scope="module", params=FAMILIES)
def learned(request, tmp_path_factory):
    changes = SERVED[request.param] | {"max_position_embeddings": MOST}
    directory = save_model(tmp_path_factory.mktemp(request.param), tiny_config(request.param, changes))
    return Model(directory, max_model_len=128)


def test_the_longest_sequence_is_the_table_whatever_was_asked_for(learned):
    assert learned.loaded.facts.max_model_len == MOST


@pytest.mark.parametrize("prompt", [1, 2, MOST - 1])
def test_decoding_to_the_end_of_the_table(learned, prompt):
    sequence = greedy(random_ids(prompt, prompt))
    Driver(learned.loaded, MAX_ROWS).generate([sequence], MOST - prompt)
    assert len(sequence.token_ids) == MOST
    assert_margin(learned, sequence, num_outputs=MOST - prompt)


def test_a_plan_that_goes_past_the_table_is_refused_before_it_runs(learned):
    driver = Driver(learned.loaded, MAX_ROWS)
    driver.start(greedy(random_ids(1, MOST)))
    with pytest.raises(PlanViolation, match="model's length 64"):
        driver.step()


def test_rows_at_different_positions(learned):
    sequences = [greedy(random_ids(length, length)) for length in (1, 2, 31, MOST - 5)]
    Driver(learned.loaded, MAX_ROWS).generate(sequences, 5, chunk=7)
    assert_margin(learned, *sequences, num_outputs=5)


def test_going_on_from_a_cached_prefix(learned):
    prefix = random_ids(1, 10 * BLOCK_SIZE)
    first, second = greedy(prefix + random_ids(2, 1)), drawn(prefix + random_ids(3, 6), seed=3)
    driver = Driver(learned.loaded, MAX_ROWS)
    rows = [driver.start(first)]
    driver.step()
    rows.append(driver.start(second, shared_from=first, num_shared=len(prefix)))
    driver.run(rows, 5)
    assert_margin(learned, first, second, num_outputs=5)
