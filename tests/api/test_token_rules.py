"""Rules about tokens are checked before anything is queued, and mean the same at both ends of the link (C4.2)."""

import math
from typing import Any

import pytest

from executor_svc.token_rules import MAX_BANNED, check_rules, read_rules
from paged.client import generate_request
from paged.v1 import inference_pb2
from scheduler_svc.api import validation
from scheduler_svc.api.accepted import generation_request
from scheduler_svc.api.token_rules import MAX_BAD_TOKEN_SEQUENCES, MAX_BAD_WORDS, token_rules
from scheduler_svc.core.token_rules import NO_RULES
from scheduler_svc.errors import InvalidRequest
from scheduler_svc.link.codec import _row_sampling
from tests.api.test_validation import LIMITS, bad_fields, violations

VOCAB = LIMITS.vocab_size


@pytest.mark.parametrize(
    ("option", "value", "fields"),
    [
        ("logit_bias", {VOCAB - 1: 1.0}, []),
        ("logit_bias", {0: 1e4, 1: -1e4}, []),
        ("logit_bias", {VOCAB: 1.0}, ["sampling.logit_bias[0].token_id"]),
        ("logit_bias", {3: 0.0, 2**32 - 1: 1.0}, ["sampling.logit_bias[1].token_id"]),
        *[("logit_bias", {3: bad}, ["sampling.logit_bias[0].bias"]) for bad in (1e30, -1e30, math.inf, math.nan)],
        ("logit_bias", dict.fromkeys(range(10_000), 1.0), ["sampling.logit_bias"]),
        ("allowed_token_ids", [VOCAB - 1], []),
        ("allowed_token_ids", [1, 1], []),
        ("allowed_token_ids", [1, VOCAB], ["sampling.allowed_token_ids[1]"]),
        ("allowed_token_ids", [1] * 4097, ["sampling.allowed_token_ids"]),
        ("bad_words", ["a", "é" * 128], []),
        ("bad_words", ["a", ""], ["sampling.bad_words[1]"]),
        ("bad_words", ["é" * 129], ["sampling.bad_words[0]"]),
        ("bad_words", ["a"] * 129, ["sampling.bad_words"]),
        ("bad_token_sequences", [[1], [2] * 16], []),
        ("bad_token_sequences", [[1], []], ["sampling.bad_token_sequences[1].ids"]),
        ("bad_token_sequences", [[2] * 17], ["sampling.bad_token_sequences[0].ids"]),
        ("bad_token_sequences", [[1, VOCAB]], ["sampling.bad_token_sequences[0].ids[1]"]),
        ("bad_token_sequences", [[1]] * 129, ["sampling.bad_token_sequences"]),
    ],
)
def test_a_rule_out_of_its_range_is_refused_by_the_path_of_its_field(
    option: str, value: Any, fields: list[str]
) -> None:
    assert bad_fields(**{option: value}) == fields


@pytest.mark.parametrize("token_id", [-1, 2**32, 2**63 - 1])
def test_an_id_that_no_message_can_hold_is_refused_by_the_client(token_id: int) -> None:
    for option, value in (("logit_bias", {token_id: 1.0}), ("bad_token_sequences", [[token_id]])):
        with pytest.raises(ValueError, match=option):
            generate_request("hi", **{option: value})  # type: ignore[arg-type]


def test_an_id_with_two_biases_is_refused() -> None:
    request = generate_request("hi", logit_bias={7: 1.0})
    request.sampling.logit_bias.add(token_id=7, bias=2.0)
    assert list(violations(request)) == ["sampling.logit_bias[1].token_id"]


def test_many_bad_entries_become_a_few_violations() -> None:
    assert len(bad_fields(logit_bias={VOCAB + i: 1.0 for i in range(500)})) == 16


def rules_of(*spellings: list[list[int]], **options: Any) -> Any:
    request = generate_request("hi", **options)
    return generation_request(request, [1], LIMITS, spellings).sampling.rules


def refused(*spellings: list[list[int]], **options: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        rules_of(*spellings, **options)
    return caught.value.violations[0].field


def test_words_that_cannot_be_had_are_refused_by_their_place() -> None:
    assert refused([[1]], [], bad_words=["a", "b"]) == "sampling.bad_words[1]"
    assert refused([[1], [2] * 17], bad_words=["a"]) == "sampling.bad_words[0]"
    assert refused([[1, VOCAB]], bad_words=["a"]) == "sampling.bad_words[0]"


def test_rules_that_could_leave_nothing_to_draw_are_refused() -> None:
    assert refused(allowed_token_ids=[3, 4], bad_token_sequences=[[3], [7, 4]]) == "sampling.allowed_token_ids"
    assert refused([[4]], allowed_token_ids=[4], bad_words=["x"]) == "sampling.allowed_token_ids"
    held = {"allowed_token_ids": [3, 4], "stop_token_ids": [3, 4]}
    assert refused(**held, min_tokens=1) == "sampling.allowed_token_ids"
    assert rules_of(**held).allowed_ids == (3, 4)
    everything = [list(range(i, VOCAB, 4)) for i in range(4)]
    with pytest.raises(InvalidRequest, match="leave nothing"):
        token_rules(inference_pb2.SamplingParams(), [[[i] for ids in everything for i in ids]], VOCAB, ())


def test_the_models_own_end_tokens_count_among_those_held_back() -> None:
    limits = validation.Limits("tiny", VOCAB, 64, 20, 8, 8192, eos_token_ids=(5, 9))
    asked = generate_request("hi", allowed_token_ids=[5, 9], min_tokens=2)
    with pytest.raises(InvalidRequest, match="allowed_token_ids"):
        generation_request(asked, [1], limits)
    asked.stop.ignore_eos = True
    assert generation_request(asked, [1], limits).sampling.rules.allowed_ids == (5, 9)


def test_rules_say_the_same_to_the_executor_and_the_most_that_a_request_may_ask_for_is_taken() -> None:
    assert rules_of() is NO_RULES
    rules = rules_of([[1, 2], [3]], logit_bias={7: 0.5, 2: -3.0}, allowed_token_ids=[9, 8, 9], bad_words=["x"])
    request = generate_request("hi", logit_bias={7: 0.5, 2: -3.0}, allowed_token_ids=[9, 8, 9])
    sampling = generation_request(request, [1], LIMITS, [[[1, 2], [3]]]).sampling
    assert sampling.rules == rules
    message = _row_sampling(sampling, ())
    check_rules("sampling", message, VOCAB)
    read = read_rules(message)
    assert (read.bias_ids.tolist(), read.biases.tolist()) == ([7, 2], [0.5, -3.0])
    assert (read.allowed_ids.tolist(), [ids.tolist() for ids in read.banned]) == ([9, 8], [[1, 2], [3]])
    assert MAX_BAD_TOKEN_SEQUENCES + 2 * MAX_BAD_WORDS <= MAX_BANNED  # a word has two spellings
