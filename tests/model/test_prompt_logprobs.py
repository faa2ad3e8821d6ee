"""Log-probabilities of a prompt's own tokens: what one whole pass of transformers gives, however they are computed."""

import numpy as np
import pytest
import torch

from executor_svc.model import prompt_scores
from tests.margin import MARGIN, assert_drawn, assert_logprobs, reference_logits
from tests.model.conftest import MAX_ROWS, Model, random_ids
from tests.model.driver import Driver, Sequence, row_sampling
from tests.model.families import SERVED, tiny_config
from tests.tiny_models import save_model

LENGTHS = [1, 2, 8, 9, 17, 33]
K = 3


def scored(prompt, **parameters):
    return Sequence(list(prompt), len(prompt), row_sampling(prompt_logprobs=K, **parameters))


def entries_of(
    driver: Driver, rows: list[int], chunk: int | None
) -> dict[int, list[tuple[int, list[int], list[float]]]]:
    """Rank, ids and values of each row's prompt tokens but the first; steps until all prompts are computed."""
    told = {row: [] for row in rows}
    while any(not driver.sequences[row].outputs for row in rows):
        begins = {row: driver.sequences[row].num_computed for row in rows}
        due = [row for row in rows if not driver.sequences[row].outputs]
        driver.step(chunk, due)
        columns = driver.prompt_logprobs
        counts = [
            max(0, min(driver.sequences[row].num_computed, driver.sequences[row].num_prompt - 1) - begins[row])
            for row in due
        ]
        assert (columns is not None) == any(counts)
        at = 0
        for row, count in zip(due, counts, strict=True):
            for _ in range(count):
                part = slice(at * (K + 1), (at + 1) * (K + 1))
                told[row].append((int(columns.ranks[at]), columns.ids[part].tolist(), columns.values[part].tolist()))
                at += 1
        assert columns is None or at == len(columns.ranks)
    return told


def assert_as_transformers(reference, prompt, entries, margin=MARGIN):
    assert len(entries) == len(prompt) - 1
    if len(prompt) == 1:
        return
    expected = torch.log_softmax(reference_logits(reference, prompt).double(), -1)
    for position, (rank, ids, values) in enumerate(entries):
        row = expected[position]
        assert ids[0] == prompt[position + 1]
        torch.testing.assert_close(torch.tensor(values).double(), row[ids], atol=margin, rtol=0)
        torch.testing.assert_close(torch.tensor(values[1:]).double(), row.topk(K).values, atol=margin, rtol=0)
        above, near = (int((row > row[ids[0]] + shift).sum()) for shift in (margin, -margin))
        assert above < rank <= max(near, above + 1)


@pytest.mark.parametrize("chunk", [None, 8, 1])
def test_they_are_those_of_one_whole_pass_in_chunks_and_beside_each_other(llama, chunk, monkeypatch):
    monkeypatch.setattr(prompt_scores, "MAX_ELEMENTS", 5 * llama.loaded.facts.vocab_size)  # five at once
    driver = Driver(llama.loaded, MAX_ROWS)
    prompts = [random_ids(length, length) for length in LENGTHS]
    rows = [driver.start(scored(prompt)) for prompt in prompts]
    told = entries_of(driver, rows, chunk)
    for row, prompt in zip(rows, prompts, strict=True):
        assert_as_transformers(llama.reference, prompt, told[row])


def test_a_row_tells_of_what_it_computes_and_of_nothing_before(llama):
    driver = Driver(llama.loaded, MAX_ROWS)
    prompt = random_ids(3, 22)
    first = scored(prompt)
    row = driver.start(first)
    whole = entries_of(driver, [row], None)[row]
    again = driver.start(scored(prompt), shared_from=first, num_shared=20)
    assert [entry[:2] for entry in entries_of(driver, [again], None)[again]] == [entry[:2] for entry in whole[20:]]


def test_rows_beside_a_scored_prompt_draw_what_they_should(llama):
    driver = Driver(llama.loaded, MAX_ROWS)
    prompt = random_ids(5, 9)
    drawn = Sequence(list(prompt), 9, row_sampling(temperature=1.0, seed=4, logprobs=2))
    driver.start(drawn)
    driver.start(scored(random_ids(6, 30)))
    for _ in range(6):
        driver.step(7)
    logits = reference_logits(llama.reference, drawn.token_ids)
    assert_drawn(logits, drawn.token_ids, 9, drawn.sampling)
    assert_logprobs(logits, drawn.token_ids, 9, drawn.logprobs)


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite", "opt", "phi", "gpt_neox", "gpt2", "mixtral"])
def test_whatever_a_models_head_does_is_done_to_them(family, tmp_path):
    """Soft caps, scales, biases, other sizes: the head's own code runs."""
    served = Model(save_model(tmp_path, tiny_config(family, SERVED[family])))
    driver = Driver(served.loaded, MAX_ROWS)
    prompt = random_ids(7, 20)
    row = driver.start(scored(prompt))
    assert_as_transformers(served.reference, prompt, entries_of(driver, [row], 6)[row])


def test_a_model_that_is_not_made_of_two_parts_is_scored_too(tiny_directories, monkeypatch):
    served = Model(tiny_directories["llama"])
    model = served.loaded.runner.forward.model
    monkeypatch.setattr(model, "get_decoder", lambda: model)
    driver = Driver(served.loaded, MAX_ROWS)
    prompt = random_ids(8, 20)
    row = driver.start(scored(prompt))
    assert_as_transformers(served.reference, prompt, entries_of(driver, [row], 6)[row])


def test_logits_that_are_not_finite_are_told_by_no_token_and_rank_0(tiny_directories):
    served = Model(tiny_directories["llama"])
    with torch.no_grad():
        served.loaded.runner.forward.model.get_input_embeddings().weight[17] = torch.nan
    driver = Driver(served.loaded, MAX_ROWS)
    row, other = (driver.start(scored(prompt)) for prompt in ([5, 6, 17, 8], [5, 6, 7, 8]))
    told = entries_of(driver, [row, other], None)
    assert told[row][2][0] == 0
    assert told[row][2][1] == [-1] * (K + 1)
    assert not np.isnan(told[row][2][2]).any()
    assert all(rank > 0 for rank, _, _ in told[other])
