"""Requests whose answers are chosen among several: beam search, and the best of samples."""

import math
from collections.abc import Iterator

from paged.v1 import inference_pb2
from scheduler_svc.core.beam import EarlyStopping
from scheduler_svc.errors import FieldViolation
from scheduler_svc.requests import BeamOptions

MAX_BEAM_WIDTH = 256
MAX_LENGTH_PENALTY = 10.0
# What a request for beams may have: everything that says how a token is drawn has no meaning there.
FIELDS_WITH_BEAM = frozenset(
    (
        "request_id",
        "model",
        "text",
        "token_ids",
        "chat",
        "stop",
        "stream",
        "logprobs",
        "cache_salt",
        "n",
        "beam",
        "echo",
        "truncate_prompt_tokens",
        "priority",
        "tenant",
        "prefix_cache_bypass",
    )
)
_EARLY_STOPPING = {
    inference_pb2.BeamSearch.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.NO,
    inference_pb2.BeamSearch.EARLY_STOPPING_NO: EarlyStopping.NO,
    inference_pb2.BeamSearch.EARLY_STOPPING_YES: EarlyStopping.YES,
    inference_pb2.BeamSearch.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}


def choosing_violations(
    request: inference_pb2.GenerateRequest, vocab_size: int, max_samples: int, num_model_ends: int
) -> Iterator[FieldViolation]:
    """What is wrong with `beam`, `best_of`, and the fields that do not go with them."""
    if request.HasField("best_of"):
        lowest = max(request.n, 1)
        if not lowest <= request.best_of <= max_samples:
            found = f"is {request.best_of}; must be {lowest}, the number of answers, to {max_samples}"
            yield FieldViolation("best_of", found)
        if request.HasField("prompt_logprobs"):
            yield FieldViolation("prompt_logprobs", "does not go with best_of: ask for them apart")
    if not request.HasField("beam"):
        return
    num_ends = len(request.stop.token_ids) + (0 if request.stop.ignore_eos else num_model_ends)
    most = min(max_samples, MAX_BEAM_WIDTH, max(vocab_size - num_ends, 1))
    if not 1 <= request.beam.width <= most:
        yield FieldViolation("beam.width", f"is {request.beam.width}; must be 1 to {most}")
    elif request.n > request.beam.width:
        yield FieldViolation("n", f"is {request.n}; a search of {request.beam.width} beams has no more answers")
    penalty = request.beam.length_penalty
    if not (math.isfinite(penalty) and abs(penalty) <= MAX_LENGTH_PENALTY):
        allowed = f"[-{MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}]"
        yield FieldViolation("beam.length_penalty", f"is {penalty:g}; must be in {allowed}")
    if request.beam.early_stopping not in _EARLY_STOPPING:
        yield FieldViolation("beam.early_stopping", f"is {request.beam.early_stopping}; must be a known value")
    yield from _violations_beside_beam(request)


def beam_options(request: inference_pb2.GenerateRequest) -> BeamOptions | None:
    """Of a request that has no such violations."""
    beam = request.beam
    if not request.HasField("beam"):
        return None
    penalty = beam.length_penalty if beam.HasField("length_penalty") else 1.0
    return BeamOptions(beam.width, penalty, _EARLY_STOPPING[beam.early_stopping])


def _violations_beside_beam(request: inference_pb2.GenerateRequest) -> Iterator[FieldViolation]:
    reason = "does not go with beam; leave it unset"
    for field, _ in request.sampling.ListFields():
        yield FieldViolation(f"sampling.{field.name}", reason)
    if request.stop.strings:
        yield FieldViolation("stop.strings", reason)
    for field, _ in request.ListFields():
        if field.name not in FIELDS_WITH_BEAM and field.name != "sampling":
            yield FieldViolation(field.name, reason)
