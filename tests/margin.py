"""The margin rule: what an engine generated, judged by transformers with the engine's own ids as context.

Equal ids would be too strict, for rows of a batched product differ in the last bit from a single row; and too weak,
for a lost context token rarely changes the most likely one.
"""

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from executor_svc.model.randomness import random_uniform
from executor_svc.token_rules import read_rules
from paged.v1 import executor_pb2

MARGIN = 1e-4  # nats, and probability


def reference_model(directory, dtype=torch.float32) -> PreTrainedModel:
    """The oracle: transformers' own attention, no cache."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """float32 `[len(token_ids), vocab]`; row p is what follows the first p + 1 tokens."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float()


def greedy_gaps(logits: torch.Tensor, token_ids: list[int], num_prompt: int) -> torch.Tensor:
    """By how many nats the best choice beats the engine's, at each output token."""
    outputs = torch.tensor(token_ids[num_prompt:])
    rows = torch.log_softmax(logits[num_prompt - 1 : len(token_ids) - 1].double(), -1)
    return rows.amax(-1) - rows.gather(1, outputs[:, None])[:, 0]


def assert_greedy(logits: torch.Tensor, token_ids: list[int], num_prompt: int, margin: float = MARGIN) -> None:
    gaps = greedy_gaps(logits, token_ids, num_prompt)
    assert len(gaps)
    assert gaps.max() <= margin, f"output {gaps.argmax()} is {gaps.max():.3g} nats below the best choice"


def distribution(
    logits: torch.Tensor, context: list[int], num_prompt: int, sampling: executor_pb2.RowSampling
) -> torch.Tensor:
    """float64 `[vocab]`: what a token after `context` is drawn from, by transformers' own processors in their order."""
    ids, scores = torch.tensor([context]), logits[None].clone()
    rules = read_rules(sampling)
    if len(rules.bias_ids):
        biases = {(i,): bias for i, bias in zip(rules.bias_ids.tolist(), rules.biases.tolist(), strict=True)}
        scores = SequenceBiasLogitsProcessor(biases)(ids, scores)
    if sampling.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, scores)
    counts = torch.bincount(torch.tensor(context[num_prompt:], dtype=torch.int64), minlength=scores.shape[1])
    scores = scores - counts * sampling.frequency_penalty - (counts > 0) * sampling.presence_penalty
    if len(rules.allowed_ids):
        scores = PrefixConstrainedLogitsProcessor(lambda *_: rules.allowed_ids.tolist(), 1)(ids, scores)
    if rules.banned:
        scores = NoBadWordsLogitsProcessor([sequence.tolist() for sequence in rules.banned])(ids, scores)
    if len(context) - num_prompt < sampling.min_tokens:
        scores[:, list(sampling.end_token_ids)] = -torch.inf
    scores = scores.double()
    if sampling.temperature != 1:
        scores = TemperatureLogitsWarper(sampling.temperature)(ids, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
    if sampling.min_p > 0:
        scores = MinPLogitsWarper(sampling.min_p)(ids, scores)
    return torch.softmax(scores, -1)[0]


def assert_drawn(
    logits: torch.Tensor,
    token_ids: list[int],
    num_prompt: int,
    sampling: executor_pb2.RowSampling,
    margin: float = MARGIN,
) -> None:
    """Each output's interval of its distribution contains the random number that it was drawn with."""
    assert len(token_ids) > num_prompt
    for position in range(num_prompt, len(token_ids)):
        probabilities = distribution(logits[position - 1], token_ids[:position], num_prompt, sampling)
        drawn = token_ids[position]
        u = float(random_uniform(sampling.seed, sampling.index, position))
        before = float(probabilities[:drawn].sum())
        interval = (before - margin, before + float(probabilities[drawn]) + margin)
        assert interval[0] <= u < interval[1], f"position {position}: {u} is not in {interval} of token {drawn}"


def assert_logprobs(
    logits: torch.Tensor,
    token_ids: list[int],
    num_prompt: int,
    columns: list[tuple[list[int], list[float], int]],
    margin: float = MARGIN,
) -> None:
    """`columns`, one an output: ids (the drawn token, then the most likely), their log-probabilities, and the rank."""
    assert len(columns) == len(token_ids) - num_prompt
    for position, (ids, values, rank) in enumerate(columns, num_prompt):
        expected = torch.log_softmax(logits[position - 1].double(), -1)
        assert ids[0] == token_ids[position]
        torch.testing.assert_close(torch.tensor(values).double(), expected[ids], atol=margin, rtol=0)
        best = expected.topk(len(ids) - 1).values
        torch.testing.assert_close(torch.tensor(values[1:]).double(), best, atol=margin, rtol=0)
        above, near = (int((expected > expected[ids[0]] + shift).sum()) for shift in (margin, -margin))
        assert above < rank <= max(near, above + 1), f"position {position}: rank {rank}, of {above + 1} to {near}"
