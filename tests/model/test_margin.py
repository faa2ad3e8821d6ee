"""The real model, driven plan by plan, gives what transformers gives: however its tokens are split over steps."""

import pytest

from tests.margin import MARGIN, assert_drawn, assert_greedy, assert_logprobs, reference_logits
from tests.model.conftest import BLOCK_SIZE, MAX_ROWS, random_ids
from tests.model.driver import Driver, Sequence, row_sampling

LENGTHS = [1, 3, 4, 7, 8, 9, 16, 33]
NUM_OUTPUTS = 12


def greedy(prompt, **parameters):
    return Sequence(list(prompt), len(prompt), row_sampling(logprobs=4, **parameters))


def drawn(prompt, seed, **parameters):
    return Sequence(list(prompt), len(prompt), row_sampling(logprobs=2, temperature=0.9, seed=seed, **parameters))


def assert_margin(model, *sequences, num_outputs=NUM_OUTPUTS, margin=MARGIN):
    for sequence in sequences:
        assert len(sequence.outputs) == num_outputs
        logits = reference_logits(model.reference, sequence.token_ids)
        if sequence.sampling.temperature == 0:
            assert_greedy(logits, sequence.token_ids, sequence.num_prompt, margin)
        else:
            assert_drawn(logits, sequence.token_ids, sequence.num_prompt, sequence.sampling, margin)
        assert_logprobs(logits, sequence.token_ids, sequence.num_prompt, sequence.logprobs, margin)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_sequence_alone(model, length):
    sequence = greedy(random_ids(length, length))
    Driver(model.loaded, MAX_ROWS).generate([sequence], NUM_OUTPUTS)
    assert_margin(model, sequence)


def test_a_batch_of_mixed_lengths_greedy_and_drawn(model):
    prompts = [random_ids(length, length) for length in LENGTHS]
    sequences = [greedy(prompt) for prompt in prompts] + [drawn(prompt, i) for i, prompt in enumerate(prompts)]
    Driver(model.loaded, MAX_ROWS).generate(sequences, NUM_OUTPUTS)
    assert_margin(model, *sequences)


@pytest.mark.parametrize("chunk", [1, 3, BLOCK_SIZE, BLOCK_SIZE + 1])
def test_prompts_in_chunks_beside_rows_that_decode(model, chunk):
    sequences = [greedy(random_ids(length, length)) for length in (1, 40, 9, 21)]
    Driver(model.loaded, MAX_ROWS).generate(sequences, NUM_OUTPUTS, chunk)
    assert_margin(model, *sequences)


def test_rows_that_begin_while_others_decode(model):
    driver = Driver(model.loaded, MAX_ROWS)
    sequences = [greedy(random_ids(i, 5 * i + 1)) for i in range(5)]
    rows = []
    for sequence in sequences:
        rows.append(driver.start(sequence))
        driver.step(chunk=6)
    driver.run(rows, NUM_OUTPUTS, chunk=6)
    assert_margin(model, *sequences)


def test_a_prefix_in_shared_blocks(model):
    driver = Driver(model.loaded, MAX_ROWS)
    prefix = random_ids(1, 5 * BLOCK_SIZE)
    first = greedy(prefix + random_ids(2, 3))
    row = driver.start(first)
    driver.step()
    others = [greedy(prefix + random_ids(i, i)) for i in range(1, 5)]
    rows = [driver.start(other, shared_from=first, num_shared=len(prefix)) for other in others]
    driver.run([row, *rows], NUM_OUTPUTS)
    assert_margin(model, first, *others)


def test_a_preempted_sequence_is_computed_again_in_other_blocks(model):
    driver = Driver(model.loaded, MAX_ROWS)
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2}
    sequences = [greedy(random_ids(7, 11)), drawn(random_ids(8, 18), seed=5, **penalties), greedy(random_ids(9, 6))]
    rows = [driver.start(sequence) for sequence in sequences]
    for _ in range(5):
        driver.step()
    preempted = [driver.end(row) for row in rows[:2]]
    for sequence in preempted:
        driver.reuse(sequence.table)
    driver.step(rows=rows[2:])
    rows = [driver.start(sequence) for sequence in preempted] + rows[2:]
    driver.run(rows, NUM_OUTPUTS)
    assert_margin(model, *sequences)


def test_forks_share_the_prompt_and_draw_apart(model):
    driver = Driver(model.loaded, MAX_ROWS)
    first = drawn(random_ids(3, 10), seed=11, index=0)
    row = driver.start(first)
    driver.step(chunk=6)
    driver.step()
    rows = [row, *(driver.fork(row, drawn([0], seed=11, index=i).sampling) for i in (1, 2))]
    sequences = [driver.sequences[r] for r in rows]
    for sequence in sequences[1:]:
        sequence.logprobs = list(first.logprobs)
    driver.run(rows, NUM_OUTPUTS)
    assert_margin(model, first)
    for sequence in sequences[1:]:
        logits = reference_logits(model.reference, sequence.token_ids)
        assert_logprobs(logits, sequence.token_ids, sequence.num_prompt, sequence.logprobs)
        assert_drawn(logits, sequence.token_ids, sequence.num_prompt + 1, sequence.sampling)
    assert len({tuple(sequence.outputs) for sequence in sequences}) == 3
