"""Masks at the sampler: nothing else is drawn, what is drawn keeps its share, and log-probabilities do not change."""

import numpy as np
import pytest
import torch

from executor_svc.model import token_masks
from executor_svc.model.sampler import Sampler
from executor_svc.step import Masks, RowStart, mask_bytes
from tests.model.driver import row_sampling

CPU = torch.device("cpu")


def masks(vocab: int, allowed: dict[int, list[int]]) -> Masks:
    """Allowed ids by place."""
    bits = np.zeros((len(allowed), mask_bytes(vocab) * 8), np.uint8)
    for row, ids in zip(bits, allowed.values(), strict=True):
        row[ids] = 1
        row[vocab:] = 1  # means nothing
    return Masks(np.array(list(allowed), np.int32), np.packbits(bits, axis=1, bitorder="little"))


def draw(logits, parameters, allowed, position=5, context=(1, 2)):
    vocab = logits.shape[1]
    sampler = Sampler(vocab, CPU)
    rows = np.arange(len(logits), dtype=np.int32)
    sampler.start_rows([RowStart(row, np.array(context, np.int32), 2, parameters[row]) for row in rows.tolist()])
    masking = masks(vocab, allowed) if allowed else None
    drawn, logprobs = sampler.sample(logits, rows, np.full(len(rows), position, np.int32), masking)
    return drawn.tolist(), logprobs


@pytest.mark.parametrize("vocab", [31, 32, 33, 50, 320])
def test_the_best_allowed_token_is_taken_whatever_the_width_and_others_are_left_alone(vocab):
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab))
    allowed = {1: [0, 3, vocab - 1], 3: [vocab - 1]}
    drawn, _ = draw(logits, [row_sampling()] * 4, allowed)
    best = logits.argmax(-1).tolist()
    assert drawn == [best[0], max(allowed[1], key=lambda i: float(logits[1, i])), best[2], vocab - 1]


@pytest.mark.parametrize("parameters", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3}], ids=str)
def test_draws_are_those_of_a_model_that_has_no_other_tokens(parameters):
    rows, vocab, ids = 300, 64, [2, 9, 33, 40, 63]
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(8))
    many = [row_sampling(temperature=0.8, seed=seed, **parameters) for seed in range(rows)]
    drawn, _ = draw(logits.expand(rows, -1), many, dict.fromkeys(range(rows), ids))
    smaller, _ = draw(logits[ids].expand(rows, -1), many, {})
    assert drawn == [ids[token] for token in smaller]
    assert len(set(drawn)) > 1


def test_a_mask_comes_after_penalties_and_before_end_tokens_are_held_back():
    logits = torch.zeros(1, 40)
    logits[0, [7, 8, 9]] = torch.tensor([3.0, 2.9, 2.8])
    parameters = row_sampling(presence_penalty=1.0, min_tokens=9, end_token_ids=[8])
    assert draw(logits, [parameters], {0: [7, 8, 9]}, context=(1, 2, 7))[0] == [9]


def test_log_probabilities_are_those_of_the_model_and_the_rank_is_among_all():
    logits = torch.arange(50, dtype=torch.float32).unsqueeze(0)
    (token,), logprobs = draw(logits, [row_sampling(logprobs=2)], {0: [10, 20]})
    assert token == 20
    assert logprobs.ids.tolist() == [20, 49, 48]
    assert logprobs.values[0] == pytest.approx(float(logits.log_softmax(-1)[0, 20]))
    assert logprobs.ranks.tolist() == [30]


def test_logits_that_are_not_finite_are_told_although_a_mask_hides_them():
    logits = torch.zeros(2, 40)
    logits[0, 5] = torch.nan
    assert draw(logits, [row_sampling()] * 2, {0: [7], 1: [7]})[0] == [-1, 7]


def test_nothing_left_to_draw_is_told_as_minus_one():
    parameters = row_sampling(min_tokens=9, end_token_ids=[7])
    assert draw(torch.zeros(1, 40), [parameters], {0: [7]})[0] == [-1]


def test_many_masked_rows_are_worked_on_in_parts(monkeypatch):
    logits = torch.randn(7, 40, generator=torch.Generator().manual_seed(1))
    allowed = {row: [row, row + 20] for row in range(7)}
    whole, _ = draw(logits, [row_sampling()] * 7, allowed)
    monkeypatch.setattr(token_masks, "MAX_ELEMENTS", 80)
    assert draw(logits, [row_sampling()] * 7, allowed)[0] == whole
