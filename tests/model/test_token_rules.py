"""Biases, allowed tokens and banned sequences: every token is drawn from what transformers' processors leave."""

import math
import random

import numpy as np
import pytest
import torch

from executor_svc.model.randomness import random_uniform
from executor_svc.model.row_tables import ForkWithoutPast
from executor_svc.model.sampler import Sampler
from executor_svc.step import RowStart
from tests.margin import distribution
from tests.model.driver import row_sampling
from tests.model.test_sampler import CONTEXT, CPU, NUM_PROMPT, VOCAB, random_logits, sample, sampler_with
from tests.rules import rule_columns

EVERY_ID_BUT_TWO = [[i] for i in range(VOCAB) if i not in (4, 30)]
RULES = [
    {"bias": {7: 3.0, 9: -2.5, 49: 1.0}},
    {"allowed": [0, 7, 9, 49]},
    {"banned": [[3], [7], [0]]},
    {"banned": [[12, 7, 9], [7, 12], [9, 12, 7, 3], [7, 7], [1, 7, 9]]},  # of the context 7 7 7 3 9 9 12 7
    {"banned": [[*CONTEXT[-7:], 9], [*CONTEXT, 11], [5, *CONTEXT[1:], 12]]},
    {"banned": EVERY_ID_BUT_TWO},
    {"bias": {7: 5.0, 3: -1e4}, "allowed": [3, 7, 9, 12, 20], "banned": [[20], [7, 7], [12, 7, 9]]},
]
OTHERS = [
    {},
    {"repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": -0.4},
    {"top_k": 5, "top_p": 0.8, "min_p": 0.02, "min_tokens": 9, "end_token_ids": [7, 21]},
]


@pytest.mark.parametrize("others", OTHERS, ids=str)
@pytest.mark.parametrize("rules", RULES, ids=lambda rules: "+".join(rules))
def test_each_draw_is_the_inverse_of_the_distribution_that_transformers_makes(rules, others):
    many = [row_sampling(temperature=1.3, seed=seed, **others, **rule_columns(**rules)) for seed in range(300)]
    logits = random_logits(1).expand(300, -1)
    drawn, _ = sample(sampler_with(*many, context=CONTEXT, num_prompt=NUM_PROMPT), logits, len(CONTEXT))
    expected = distribution(logits[0], CONTEXT, NUM_PROMPT, many[0])
    ends = expected.cumsum(0)
    for token, seed in zip(drawn, range(300), strict=True):
        u = float(random_uniform(seed, 0, len(CONTEXT)))
        assert expected[token] > 0
        assert ends[token] - expected[token] - 1e-6 <= u < ends[token] + 1e-6


def test_rows_with_and_without_rules_are_each_as_alone():
    chance = random.Random(1)
    logits = random_logits(2, rows=40)
    sampling = [
        row_sampling(temperature=1.0, seed=i, **rule_columns(**chance.choice(RULES)) if i % 3 else {})
        for i in range(40)
    ]
    together, _ = sample(sampler_with(*sampling, context=CONTEXT, num_prompt=NUM_PROMPT), logits)
    for i in range(40):
        sampler = Sampler(VOCAB, CPU)
        sampler.start_rows([RowStart(100 + i, np.array(CONTEXT, np.int32), NUM_PROMPT, sampling[i])])
        assert sample(sampler, logits[i : i + 1], rows=[100 + i])[0] == [together[i]]


def never_said(said: list[int], banned: list[list[int]]) -> bool:
    return not any(
        said[end - len(ids) : end] == ids for ids in banned for end in range(len(CONTEXT) + 1, len(said) + 1)
    )


def test_a_banned_sequence_is_never_completed_by_what_is_drawn_nor_by_prompt_and_drawn_tokens_together():
    """Of five likely ids, so that each sequence would be met often."""
    banned = [[7, 9], [9, 9, 3], [12, 12], [3, 7, 3], [20, 12, 9, 3]]
    parameters = {"temperature": 1.0, **rule_columns(allowed=[3, 7, 9, 12, 20], banned=banned)}
    sampler = sampler_with(*(row_sampling(seed=i, **parameters) for i in range(8)), context=CONTEXT, num_prompt=5)
    said = [list(CONTEXT) for _ in range(8)]
    for i in range(60):
        drawn, _ = sample(sampler, torch.zeros(8, VOCAB), len(CONTEXT) + i)
        for row, token in enumerate(drawn):
            said[row].append(token)
    assert all(never_said(row, banned) for row in said)
    assert {token for row in said for token in row} == {3, 7, 9, 12, 20}


def test_a_row_that_begins_again_remembers_the_tokens_it_had_drawn():
    parameters = row_sampling(temperature=1.0, seed=4, **rule_columns(allowed=[1, 2, 3], banned=[[1, 1], [2, 1, 3]]))
    sampler = sampler_with(parameters, context=[1, 2], num_prompt=2)
    logits = torch.zeros(1, VOCAB)
    undisturbed = [sample(sampler, logits, 2 + i)[0][0] for i in range(30)]
    sampler = sampler_with(parameters, context=[1, 2, *undisturbed[:9]], num_prompt=2)
    assert [sample(sampler, logits, 2 + i)[0][0] for i in range(9, 30)] == undisturbed[9:]


def test_a_child_remembers_what_its_parent_drew():
    parameters = row_sampling(temperature=1.0, seed=4, **rule_columns(allowed=[1, 2, 3], banned=[[1, 1], [2, 1, 3]]))
    sampler = sampler_with(parameters, context=[1, 2], num_prompt=2)
    for i in range(5):
        sample(sampler, torch.zeros(1, VOCAB), 2 + i)
    sampler.fork_rows(np.array([0], np.int32), np.array([1], np.int32), [parameters])
    for i in range(5, 30):
        parent, child = sample(sampler, torch.zeros(2, VOCAB), 2 + i)[0]
        assert parent == child
    with pytest.raises(ForkWithoutPast, match="banned"):
        sampler_with(row_sampling()).fork_rows(np.array([0], np.int32), np.array([1], np.int32), [parameters])


def test_rows_with_equal_rules_share_them_and_the_last_one_gives_them_back():
    same, other = row_sampling(**rule_columns(allowed=[4])), row_sampling(**rule_columns(bias={5: 1e4}))
    sampler = sampler_with(same, same, other)
    sampler.end_rows(np.array([0], np.int32))
    sampler.start_rows([RowStart(0, np.array([1], np.int32), 1, row_sampling(**rule_columns(allowed=[6])))])
    assert sample(sampler, random_logits(3, rows=3))[0] == [6, 4, 5]
    sampler.end_rows(np.array([1], np.int32))
    sampler.start_rows([RowStart(1, np.array([1], np.int32), 1, row_sampling())])
    logits = random_logits(4, rows=3)
    assert sample(sampler, logits)[0] == [6, int(logits[1].argmax()), 5]
    sampler.clear()
    sampler.start_rows([RowStart(0, np.array([1], np.int32), 1, row_sampling(**rule_columns(allowed=[8])))])
    assert sample(sampler, logits[:1])[0] == [8]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rules_do_not_hide_logits_that_are_not_finite(bad):
    rules = row_sampling(**rule_columns(bias={3: 5.0}, allowed=[3, 4], banned=[[9], [7, 4]]))
    logits = random_logits(5, rows=3)
    logits[1, 11] = bad
    if bad == -math.inf:
        logits[1] = bad
    drawn, _ = sample(sampler_with(rules, rules, rules, context=CONTEXT, num_prompt=NUM_PROMPT), logits)
    assert drawn == [3, -1, 3]


def test_a_row_to_which_nothing_is_left_gives_no_token():
    rules = row_sampling(temperature=1.0, **rule_columns(allowed=[3, 4], banned=[[3], [7, 4]]))
    drawn, _ = sample(sampler_with(rules, row_sampling(), context=CONTEXT, num_prompt=5), random_logits(6, rows=2))
    assert drawn[0] == -1
    assert drawn[1] >= 0
