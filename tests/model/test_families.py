"""Every family that is served gives what transformers gives, however its tokens are split over steps and blocks."""

import pytest
import torch

from kernels.cpu import supported
from tests.model.conftest import MAX_ROWS, Model, random_ids
from tests.model.driver import Driver, Sequence
from tests.model.families import REFUSED, SERVED, tiny_config
from tests.model.test_margin import assert_margin, drawn, greedy
from tests.model.test_refusals import random_model, refusal, understand
from tests.tiny_models import WINDOW, save_model

NUM_OUTPUTS = 6
BLOCK_SIZE = 16  # which the native kernels of a CPU have a layout for
# Of each kind of replaced modules some, for levels of instructions below this CPU's best.
FEW = ["llama", "gemma2", "gpt_neox", "gpt_oss"]


def alone(model) -> list[Sequence]:
    """Nothing else is in any step."""
    sequence = greedy(random_ids(1, 2 * WINDOW))
    Driver(model.loaded, MAX_ROWS).generate([sequence], NUM_OUTPUTS)
    return [sequence]


def batched(model) -> list[Sequence]:
    """Rows of different lengths, one of which is drawn; one ends and the others go on."""
    sequences = [greedy(random_ids(2, 1)), drawn(random_ids(3, WINDOW + 1), seed=3), greedy(random_ids(4, 30))]
    Driver(model.loaded, MAX_ROWS).generate(sequences, NUM_OUTPUTS)
    return sequences


def chunked(model) -> list[Sequence]:
    """Parts that end at no border of a block, beside a row that decodes."""
    sequences = [greedy(random_ids(5, 2)), greedy(random_ids(6, 3 * BLOCK_SIZE + 2))]
    Driver(model.loaded, MAX_ROWS).generate(sequences, NUM_OUTPUTS, chunk=BLOCK_SIZE + 1)
    return sequences


def prefix_hit(model) -> list[Sequence]:
    """The second begins where the blocks end that it shares with the first, past a window."""
    prefix = random_ids(7, 3 * BLOCK_SIZE)
    first, second = greedy(prefix + random_ids(8, 3)), drawn(prefix + random_ids(9, 2), seed=9)
    driver = Driver(model.loaded, MAX_ROWS)
    rows = [driver.start(first)]
    driver.step()
    rows.append(driver.start(second, shared_from=first, num_shared=len(prefix)))
    driver.run(rows, NUM_OUTPUTS)
    return [first, second]


def preempted(model) -> list[Sequence]:
    """One gives up its blocks and begins anew with all tokens it has, in other blocks."""
    driver = Driver(model.loaded, MAX_ROWS)
    sequences = [greedy(random_ids(10, WINDOW + 3)), greedy(random_ids(11, 6))]
    first, second = (driver.start(sequence) for sequence in sequences)
    driver.step()
    driver.step()
    driver.reuse(driver.end(first).table)
    driver.step(rows=[second])
    driver.run([driver.start(sequences[0]), second], NUM_OUTPUTS)
    return sequences


SITUATIONS = {
    "alone": alone,
    "batched": batched,
    "chunked": chunked,
    "prefix hit": prefix_hit,
    "preempted": preempted,
}


def cases():
    for level in supported() or ("reference",):
        for family in SERVED:
            is_whole = level == (*supported(), "reference")[0] or family in FEW
            yield pytest.param(family, level, marks=() if is_whole else pytest.mark.slow)


@pytest.mark.parametrize(("family", "level"), list(cases()))
def test_a_family_alone_batched_chunked_after_a_prefix_hit_and_preempted(family, level, tmp_path):
    directory = save_model(tmp_path, tiny_config(family, SERVED[family]))
    model = Model(directory, block_size=BLOCK_SIZE, cpu_kernels=level)
    for situation, run in SITUATIONS.items():
        try:
            assert_margin(model, *run(model), num_outputs=NUM_OUTPUTS)
        except AssertionError as error:
            error.add_note(situation)
            raise


@pytest.mark.parametrize("family", SERVED)
def test_rounding_in_bf16_is_not_taken_for_a_fault(family):
    assert understand(random_model(tiny_config(family, SERVED[family]), torch.bfloat16))


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_served_is_refused(family):
    assert refusal(tiny_config(family, REFUSED[family]))
