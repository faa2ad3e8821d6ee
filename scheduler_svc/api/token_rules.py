"""Rules about tokens in a request: logit_bias, allowed_token_ids, bad_words and bad_token_sequences.

Refused are, besides what is out of range, rules that could leave nothing to draw: such a request would have to fail
half-way.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from paged.v1 import inference_pb2
from scheduler_svc.core.token_rules import NO_RULES, TokenRules
from scheduler_svc.errors import FieldViolation, InvalidRequest

MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 1e4
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 128
MAX_BAD_WORD_BYTES = 256
MAX_BAD_TOKEN_SEQUENCES = 128
MAX_SEQUENCE_TOKENS = 16
_MOST_VIOLATIONS = 16  # of one list

# For each bad word its spellings, each the ids of one.
Spellings = Sequence[Sequence[Sequence[int]]]


def rule_violations(sampling: inference_pb2.SamplingParams, vocab_size: int) -> list[FieldViolation]:
    """What shows before bad words are tokenized."""
    if not _has_rules(sampling):
        return []
    return [
        *_too_many("sampling.logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIASES),
        *_too_many("sampling.allowed_token_ids", len(sampling.allowed_token_ids), MAX_ALLOWED_TOKEN_IDS),
        *_too_many("sampling.bad_words", len(sampling.bad_words), MAX_BAD_WORDS),
        *_too_many("sampling.bad_token_sequences", len(sampling.bad_token_sequences), MAX_BAD_TOKEN_SEQUENCES),
    ] or [
        *islice(_bias_violations(sampling, vocab_size), _MOST_VIOLATIONS),
        *islice(_outside("sampling.allowed_token_ids", sampling.allowed_token_ids, vocab_size), _MOST_VIOLATIONS),
        *islice(_word_violations(sampling), _MOST_VIOLATIONS),
        *islice(_sequence_violations(sampling, vocab_size), _MOST_VIOLATIONS),
    ]


def token_rules(
    sampling: inference_pb2.SamplingParams, spellings: Spellings, vocab_size: int, held_back: Collection[int]
) -> TokenRules:
    """The rules of parameters in which `rule_violations` finds nothing. `held_back` are the end tokens that min_tokens
    keeps from being drawn for a while. Raises InvalidRequest for words that cannot be had, or if nothing may be left.
    """
    if not (spellings or _has_rules(sampling)):
        return NO_RULES
    violations = [
        FieldViolation(f"sampling.bad_words[{i}]", problem)
        for i, word in enumerate(spellings)
        if (problem := _problem(word, vocab_size))
    ]
    if violations:
        raise InvalidRequest(*violations)
    given = [sequence.ids for sequence in sampling.bad_token_sequences]
    banned = dict.fromkeys(tuple(ids) for ids in [*given, *(ids for word in spellings for ids in word)])
    allowed = tuple(dict.fromkeys(sampling.allowed_token_ids))
    if not (sampling.logit_bias or allowed or banned):
        return NO_RULES
    never = {ids[-1] for ids in banned}.union(held_back)
    if never.issuperset(allowed) if allowed else len(never) >= vocab_size:
        field = "sampling.allowed_token_ids" if allowed else "sampling.bad_token_sequences"
        reason = "each of these ids ends a bad word or sequence, or is an end token that stop.min_tokens holds back"
        raise InvalidRequest(FieldViolation(field, f"could leave nothing to draw: {reason}; allow one more"))
    return TokenRules(tuple((entry.token_id, entry.bias) for entry in sampling.logit_bias), allowed, tuple(banned))


def _has_rules(sampling: inference_pb2.SamplingParams) -> bool:
    return bool(sampling.logit_bias or sampling.allowed_token_ids or sampling.bad_words or sampling.bad_token_sequences)


def _too_many(field: str, count: int, most: int) -> list[FieldViolation]:
    return [FieldViolation(field, f"has {count} entries, above the limit of {most}")] if count > most else []


def _bias_violations(sampling: inference_pb2.SamplingParams, vocab_size: int) -> Iterator[FieldViolation]:
    ids = [entry.token_id for entry in sampling.logit_bias]
    yield from _outside("sampling.logit_bias", ids, vocab_size, ".token_id")
    seen: set[int] = set()
    for i, entry in enumerate(sampling.logit_bias):
        if entry.token_id in seen:
            yield FieldViolation(f"sampling.logit_bias[{i}].token_id", f"is {entry.token_id} once more; give it once")
        seen.add(entry.token_id)
        if not (math.isfinite(entry.bias) and abs(entry.bias) <= MAX_LOGIT_BIAS):
            allowed = f"[-{MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]"
            yield FieldViolation(f"sampling.logit_bias[{i}].bias", f"is {entry.bias:g}; must be in {allowed}")


def _word_violations(sampling: inference_pb2.SamplingParams) -> Iterator[FieldViolation]:
    for i, word in enumerate(sampling.bad_words):
        if not 1 <= (size := len(word.encode())) <= MAX_BAD_WORD_BYTES:
            yield FieldViolation(f"sampling.bad_words[{i}]", f"has {size} bytes; must have 1 to {MAX_BAD_WORD_BYTES}")


def _sequence_violations(sampling: inference_pb2.SamplingParams, vocab_size: int) -> Iterator[FieldViolation]:
    for i, sequence in enumerate(sampling.bad_token_sequences):
        field = f"sampling.bad_token_sequences[{i}].ids"
        if not 1 <= (count := len(sequence.ids)) <= MAX_SEQUENCE_TOKENS:
            yield FieldViolation(field, f"has {count} entries; must have 1 to {MAX_SEQUENCE_TOKENS}")
        else:
            yield from _outside(field, sequence.ids, vocab_size)


def _outside(field: str, ids: Sequence[int], vocab_size: int, part: str = "") -> Iterator[FieldViolation]:
    for i, token_id in enumerate(ids):
        if token_id >= vocab_size:
            found = f"is {token_id}; must be below the vocabulary size of {vocab_size}"
            yield FieldViolation(f"{field}[{i}]{part}", found)


def _problem(word: Sequence[Sequence[int]], vocab_size: int) -> str:
    """What is wrong with a word's spellings, or nothing."""
    if not word:
        return "gives no token"
    if (longest := max(map(len, word))) > MAX_SEQUENCE_TOKENS:
        return f"is {longest} tokens long, above the limit of {MAX_SEQUENCE_TOKENS}"
    if (highest := max(map(max, word))) >= vocab_size:
        return f"gives token {highest} where the model's vocabulary ends at {vocab_size}"
    return ""
