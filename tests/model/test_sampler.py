"""The sampler: every token is drawn from the distribution that transformers' processors describe, in that order."""

import math

import numpy as np
import pytest
import torch

from executor_svc.model import drawing
from executor_svc.model.penalties import Penalties
from executor_svc.model.randomness import random_uniform
from executor_svc.model.row_tables import ForkWithoutPast
from executor_svc.model.sampler import Sampler
from executor_svc.step import RowStart
from tests.margin import distribution
from tests.model.driver import row_sampling

VOCAB = 50
CPU = torch.device("cpu")


def random_logits(seed: int, rows: int = 1, vocab: int = VOCAB, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def sampler_with(*sampling, context=(), num_prompt=0, vocab=VOCAB) -> Sampler:
    """Row i samples as the i-th parameters say; all have the same known tokens."""
    sampler = Sampler(vocab, CPU)
    ids = np.array(context, np.int32)
    sampler.start_rows([RowStart(row, ids, num_prompt, parameters) for row, parameters in enumerate(sampling)])
    return sampler


def sample(sampler: Sampler, logits: torch.Tensor, position: int = 5, rows=None):
    rows = np.arange(len(logits), dtype=np.int32) if rows is None else np.array(rows, np.int32)
    drawn, logprobs = sampler.sample(logits, rows, np.full(len(rows), position, np.int32))
    return drawn.tolist(), logprobs


GRID = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 10, "top_p": 0.7, "min_p": 0.2},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "repetition_penalty": 0.7, "presence_penalty": 0.5, "frequency_penalty": -0.4},
    {"temperature": 1.2, "top_p": 0.85, "presence_penalty": 2.0, "frequency_penalty": 2.0},
]
CONTEXT, NUM_PROMPT = [7, 7, 7, 3, 9, 9, 12, 7], 5


@pytest.mark.parametrize("parameters", GRID, ids=str)
def test_each_draw_is_the_inverse_of_the_distribution_that_transformers_makes(parameters):
    many = [row_sampling(**parameters, seed=seed) for seed in range(400)]
    logits = random_logits(1).expand(400, -1)
    drawn, _ = sample(sampler_with(*many, context=CONTEXT, num_prompt=NUM_PROMPT), logits, len(CONTEXT))
    expected = distribution(logits[0], CONTEXT, NUM_PROMPT, many[0])
    ends = expected.cumsum(0)
    for token, seed in zip(drawn, range(400), strict=True):
        u = float(random_uniform(seed, 0, len(CONTEXT)))
        assert expected[token] > 0
        assert ends[token] - expected[token] - 1e-6 <= u < ends[token] + 1e-6


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("min_p", [0.2, 0.5])
def test_the_surviving_tokens_are_those_of_the_documented_order(temperature, min_p):
    logits = torch.tensor([0.60, 0.25, 0.10, 0.05]).log()[None]
    parameters = {"temperature": temperature, "min_p": min_p, "top_p": 0.8, "top_k": 3}
    many = [row_sampling(**parameters, seed=seed) for seed in range(5000)]
    drawn, _ = sample(sampler_with(*many, vocab=4), logits.expand(5000, -1))
    expected = distribution(logits[0], [], 0, many[0])
    counts = torch.bincount(torch.tensor(drawn), minlength=4) / 5000
    assert ((counts > 0) == (expected > 0)).all()
    torch.testing.assert_close(counts.double(), expected, atol=0.03, rtol=0)


@pytest.mark.parametrize(
    "parameters",
    [{"temperature": t, "seed": 3} for t in (0.0, 1e-45, 1e-38, 1e-30, 1e-6)]
    + [{"temperature": 1.0, "seed": 3, **extra} for extra in ({"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0})],
    ids=str,
)
@pytest.mark.parametrize("spread", [1e-3, 3.0, 1e4])
def test_what_leaves_one_token_equals_greedy_alone_and_beside_a_normal_row(parameters, spread):
    logits = random_logits(2, rows=40, spread=spread)
    sampling = [row_sampling(**parameters) if i % 2 else row_sampling(temperature=1.0, seed=i) for i in range(40)]
    drawn, _ = sample(sampler_with(*sampling), logits)
    assert drawn[1::2] == logits.argmax(-1).tolist()[1::2]
    alone, _ = sample(sampler_with(*sampling[1::2]), logits[1::2])
    assert alone == drawn[1::2]


@pytest.mark.parametrize("top_k", [0, VOCAB, VOCAB + 1, 2**31 - 1])
@pytest.mark.parametrize("temperature", [1.0, 1e4, 100.0])
def test_top_k_of_the_vocabulary_or_more_is_no_filter(top_k, temperature):
    logits = random_logits(3, rows=64)
    free = [row_sampling(temperature=temperature, seed=i) for i in range(64)]
    limited = [row_sampling(temperature=temperature, seed=i, top_k=top_k) for i in range(64)]
    assert sample(sampler_with(*free), logits)[0] == sample(sampler_with(*limited), logits)[0]


def test_equal_weights_are_kept_by_lower_id_and_no_more_than_top_p_needs():
    sampling = [row_sampling(temperature=1.0, top_p=0.5, seed=i) for i in range(500)]
    drawn, _ = sample(sampler_with(*sampling, vocab=4000), torch.zeros(500, 4000))
    assert 1900 < max(drawn) < 2000
    drawn, _ = sample(sampler_with(*sampling, vocab=10), torch.zeros(500, 10))
    assert set(drawn) == set(range(5))


def test_a_wide_nucleus_in_a_large_vocabulary_equals_a_full_sort():
    logits = random_logits(5, vocab=20_000, spread=0.5)
    many = [row_sampling(temperature=1.0, top_p=0.95, seed=seed) for seed in range(50)]
    drawn, _ = sample(sampler_with(*many, vocab=20_000), logits.expand(50, -1))
    ends = (expected := distribution(logits[0], [], 0, many[0])).cumsum(0)
    for token, seed in zip(drawn, range(50), strict=True):
        u = float(random_uniform(seed, 0, 5))
        assert ends[token] - expected[token] - 1e-6 <= u < ends[token] + 1e-6


def test_a_draw_does_not_depend_on_the_batch_nor_on_the_row():
    logits = random_logits(6, rows=33)
    sampling = [row_sampling(**GRID[i % len(GRID)], seed=i) for i in range(33)]
    together, _ = sample(sampler_with(*sampling, context=CONTEXT, num_prompt=5), logits)
    for i in range(33):
        sampler = Sampler(VOCAB, CPU)
        sampler.start_rows([RowStart(200 + i, np.array(CONTEXT, np.int32), 5, sampling[i])])
        assert sample(sampler, logits[i : i + 1], rows=[200 + i])[0] == [together[i]]


def test_parts_of_a_large_batch_are_drawn_as_the_whole_is(monkeypatch):
    logits = random_logits(6, rows=33)
    sampling = [row_sampling(**GRID[i % len(GRID)], seed=i) for i in range(33)]
    together, _ = sample(sampler_with(*sampling, context=CONTEXT, num_prompt=5), logits)
    monkeypatch.setattr("executor_svc.model.drawing.MAX_ELEMENTS", 3 * VOCAB)
    assert sample(sampler_with(*sampling, context=CONTEXT, num_prompt=5), logits)[0] == together


def test_penalties_of_a_large_batch_are_applied_in_parts_as_the_whole_is(monkeypatch):
    logits = random_logits(6, rows=33)
    kinds = [{}, {"repetition_penalty": 1.7}, {"presence_penalty": 1.0, "frequency_penalty": 0.5}]
    sampling = [row_sampling(temperature=1.0, seed=i, **kinds[i % 3]) for i in range(33)]
    together, _ = sample(sampler_with(*sampling, context=CONTEXT, num_prompt=5), logits)
    most, apply = [], Penalties.apply

    def counted(self, part, *arguments, **options):
        most.append(len(part))
        return apply(self, part, *arguments, **options)

    monkeypatch.setattr(Penalties, "apply", counted)
    monkeypatch.setattr("executor_svc.model.row_tables.MAX_ELEMENTS", 3 * VOCAB)
    assert sample(sampler_with(*sampling, context=CONTEXT, num_prompt=5), logits)[0] == together
    assert most == [3] * 7 + [1]  # 22 of the rows have one


def test_tokens_without_probability_are_never_drawn_even_at_the_ends(monkeypatch):
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, [3, 30]] = 0.0
    for u, token in ((0.0, 3), (0.5 - 2**-40, 3), (0.5, 30), (1 - 2**-53, 30)):
        monkeypatch.setattr("executor_svc.model.sampling_plan.random_uniform", lambda *_, u=u: np.array([u]))
        assert sample(sampler_with(row_sampling(temperature=1.0)), logits)[0] == [token]


def test_repetition_looks_at_prompt_and_output_the_others_at_output_alone():
    prompt, logits = [7] * 10, torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8] = 1.0, 0.9
    for parameters, token in (
        ({"presence_penalty": 2.0, "frequency_penalty": 2.0}, 7),  # in the prompt only: not punished
        ({"repetition_penalty": 1.3}, 8),
    ):
        sampler = sampler_with(row_sampling(**parameters), context=prompt, num_prompt=10)
        assert sample(sampler, logits, 10)[0] == [token]
    sampler = sampler_with(row_sampling(presence_penalty=0.2), context=prompt, num_prompt=10)
    assert [sample(sampler, logits, 10 + i)[0][0] for i in range(4)] == [7, 8, 7, 7]


def test_a_row_that_begins_again_is_penalised_as_if_it_had_never_ended():
    parameters = row_sampling(
        temperature=1.0, seed=4, repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=0.3
    )
    logits = random_logits(8, rows=12, spread=1.0)
    ids = [7] * 6
    whole = sampler_with(parameters, context=ids, num_prompt=6)
    expected = [sample(whole, logits[i : i + 1], 6 + i)[0][0] for i in range(12)]
    again = sampler_with(parameters, context=ids + expected[:5], num_prompt=6)
    assert [sample(again, logits[i : i + 1], 6 + i)[0][0] for i in range(5, 12)] == expected[5:]


def test_a_row_taken_over_by_another_sequence_keeps_nothing():
    logits = random_logits(9)
    sampler = sampler_with(row_sampling(repetition_penalty=5.0), context=list(range(25)), num_prompt=25)
    sampler.start_rows([RowStart(0, np.array([1], np.int32), 1, row_sampling())])
    assert sample(sampler, logits)[0] == logits.argmax(-1).tolist()


def test_a_child_counts_from_where_its_parent_stood():
    parameters = row_sampling(frequency_penalty=1.5)
    logits = random_logits(10, rows=8, spread=1.0)
    sampler = sampler_with(parameters, context=[1, 2], num_prompt=2)
    for i in range(3):
        sample(sampler, logits[i : i + 1], 2 + i)
    sampler.fork_rows(np.array([0], np.int32), np.array([1], np.int32), [parameters])
    for i in range(3, 8):
        parent, child = sample(sampler, logits[i : i + 1].expand(2, -1), 2 + i)[0]
        assert parent == child
    with pytest.raises(ForkWithoutPast):
        sampler_with(row_sampling()).fork_rows(np.array([0], np.int32), np.array([1], np.int32), [parameters])


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
def test_no_end_token_is_drawn_before_min_tokens(min_tokens):
    logits = torch.zeros(1, VOCAB)
    logits[0, 9], logits[0, 5], logits[0, 20] = 1e4, 1e3, 10.0
    sampler = sampler_with(row_sampling(min_tokens=min_tokens, end_token_ids=[5, 9]), context=[1] * 6, num_prompt=6)
    drawn = [sample(sampler, logits, 6 + i)[0][0] for i in range(6)]
    assert drawn == [20] * min_tokens + [9] * (6 - min_tokens)


@pytest.mark.parametrize("bad", [math.nan, math.inf, "all -inf"])
@pytest.mark.parametrize(
    "parameters",
    [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"repetition_penalty": 1.2, "logprobs": 3},
     {"min_tokens": 9, "end_token_ids": [11]}],
    ids=str,
)  # fmt: skip
def test_a_row_that_is_not_finite_gives_minus_one_and_its_neighbours_are_as_alone(bad, parameters):
    sampling = row_sampling(**parameters)
    logits = random_logits(11, rows=3)
    alone = [sample(sampler_with(sampling, context=[1, 2], num_prompt=2), logits[i : i + 1])[0][0] for i in (0, 2)]
    logits[1, 11] = bad if bad != "all -inf" else 0
    if bad == "all -inf":
        logits[1] = -math.inf
    drawn, logprobs = sample(sampler_with(*[sampling] * 3, context=[1, 2], num_prompt=2), logits)
    assert drawn == [alone[0], -1, alone[1]]
    if logprobs is not None:
        assert not np.isnan(logprobs.values).any()
        assert logprobs.ids[4:8].tolist() == [-1] * 4
        assert logprobs.ranks[1] == 0


def test_padding_of_the_head_is_never_produced():
    logits = random_logits(12, rows=40)
    logits[:, 45:] = 100.0
    sampling = [row_sampling(temperature=2.0 * (i % 2), seed=i, logprobs=5) for i in range(40)]
    drawn, logprobs = sample(sampler_with(*sampling, vocab=45), logits)
    assert max(drawn) < 45
    assert logprobs.ids.max() < 45


def test_log_probabilities_are_of_the_raw_logits_and_in_columns_of_those_who_ask():
    logits = random_logits(13, rows=5)
    asked = [0, None, 1, 5, VOCAB]
    sampling = [
        row_sampling(temperature=0.3, top_k=3, seed=i, repetition_penalty=1.5, **({} if k is None else {"logprobs": k}))
        for i, k in enumerate(asked)
    ]
    drawn, logprobs = sample(sampler_with(*sampling, context=[1, 2, 3], num_prompt=3), logits)
    expected = torch.log_softmax(logits.double(), -1)
    begin = 0
    for place, (row, k) in enumerate((row, k) for row, k in enumerate(asked) if k is not None):
        ids, values = logprobs.ids[begin : begin + k + 1], logprobs.values[begin : begin + k + 1]
        begin += k + 1
        best = expected[row].sort(descending=True)
        assert ids.tolist() == [drawn[row], *best.indices[:k].tolist()]
        np.testing.assert_allclose(values, expected[row][ids.tolist()], atol=1e-5)
        assert logprobs.ranks[place] == best.indices.tolist().index(drawn[row]) + 1
    assert begin == len(logprobs.ids) == len(logprobs.values)


def test_random_numbers_are_uniform_and_change_with_each_of_their_arguments():
    numbers = random_uniform(np.arange(200)[:, None, None], np.arange(8)[None, :, None], np.arange(50)).ravel()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert len(np.unique(numbers)) == 80_000
    counts = np.bincount((numbers * 100).astype(int), minlength=100)
    assert ((counts - 800) ** 2 / 800).sum() < 160  # chi-square with 99 degrees of freedom: p is about 1e-4
    for axis in range(3):
        cube = numbers.reshape(200, 8, 50)
        first, second = np.take(cube, range(cube.shape[axis] - 1), axis).ravel(), np.delete(cube, 0, axis).ravel()
        assert abs(np.corrcoef(first, second)[0, 1]) < 0.02


def test_random_numbers_never_change_between_versions():
    seeds, indices, positions = [0, 1, 2**64 - 1], [0, 3, 7], [0, 100, 2**31]
    recorded = [0.7702944222884193, 0.9475674051962298, 0.5976191549058736]
    assert random_uniform(seeds, indices, positions).tolist() == recorded


@pytest.mark.parametrize("spread", [0.0, 0.05, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.95, 0.9999])
def test_a_few_candidates_keep_what_sorting_all_tokens_keeps(spread, top_p):
    weights = torch.exp(random_logits(14, rows=6, vocab=5000, spread=spread).round(decimals=2))
    enough = weights.sum(-1, dtype=torch.float64) * top_p
    few, everything = drawing._keep_of_few(weights, enough), drawing._keep_of_all(weights, enough)
    assert torch.equal(few, everything)
    assert (few > 0).any(-1).all()
