"""How an acceptable request is handed to the engine."""

import math
import random
import secrets
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from paged.v1 import inference_pb2
from scheduler_svc.api.choosing import beam_options
from scheduler_svc.api.grammar import grammar_of
from scheduler_svc.api.token_rules import Spellings, token_rules
from scheduler_svc.api.validation import SAMPLING_RANGES, Limits
from scheduler_svc.core.sequence import NEUTRAL, Sampling
from scheduler_svc.requests import GenerationRequest
from scheduler_svc.trace import TRACE


def generation_request(
    request: inference_pb2.GenerateRequest,
    prompt_ids: list[int],
    limits: Limits,
    spellings: Spellings = (),
    defaults: Mapping[str, float] = MappingProxyType({}),
    expires_at: float = math.inf,
) -> GenerationRequest:
    """The request as the engine takes it, for one that passed `check_generate` and `check_prompt_ids`; `spellings` are
    those of its bad words, `defaults` what sampling parameters are where they are unset, `expires_at` the moment of its
    deadline. Raises InvalidRequest where what it may draw is not to be had."""
    stop = request.stop
    return GenerationRequest(
        request_id=request.request_id or secrets.token_hex(16),
        prompt_ids=prompt_ids,
        sampling=_sampling(request, limits, spellings, defaults),
        model=limits.model,
        max_tokens=stop.max_tokens if stop.HasField("max_tokens") else None,
        stop_strings=tuple(stop.strings),
        stop_token_ids=tuple(stop.token_ids),
        ignore_eos=stop.ignore_eos,
        include_stop_string=stop.include_stop_string,
        cache_salt=request.cache_salt,
        echo=request.echo,
        bypass_cache=request.prefix_cache_bypass,
        priority=request.priority,
        tenant=request.tenant,
        num_samples=request.n if request.HasField("n") else 1,
        beam=beam_options(request),
        best_of=request.best_of if request.HasField("best_of") else None,
        grammar=grammar_of(request),
        expires_at=expires_at,
        streams=request.stream or not request.HasField("stream"),
        trace=TRACE.get(),
    )


def _default_sampling(stated: Mapping[str, float]) -> Sampling:
    if not stated:
        return NEUTRAL
    floats: dict[str, Any] = {name: stated.get(name, getattr(NEUTRAL, name)) for name in SAMPLING_RANGES}
    return replace(NEUTRAL, **floats, top_k=int(stated.get("top_k", NEUTRAL.top_k)))


def _sampling(
    request: inference_pb2.GenerateRequest, limits: Limits, spellings: Spellings, defaults: Mapping[str, float]
) -> Sampling:
    given, stop = request.sampling, request.stop
    default = NEUTRAL if request.HasField("beam") else _default_sampling(defaults)
    top_k = given.top_k if given.HasField("top_k") else default.top_k
    # What is 0 is the same object for all of them: they are kept as long as the request is.
    floats: dict[str, Any] = {
        name: getattr(given if given.HasField(name) else default, name) or 0.0 for name in SAMPLING_RANGES
    }
    min_tokens = stop.min_tokens
    held_back: set[int] = set(stop.token_ids) if min_tokens else set()
    if min_tokens and not stop.ignore_eos:
        held_back.update(limits.eos_token_ids)
    return Sampling(
        **floats,
        # A filter that keeps the whole vocabulary is none, and the executor's columns need not hold larger numbers.
        top_k=top_k if top_k < limits.vocab_size else 0,
        seed=given.seed if given.HasField("seed") else random.getrandbits(64),
        min_tokens=min_tokens,
        logprobs=request.logprobs if request.HasField("logprobs") else None,
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        rules=token_rules(given, spellings, limits.vocab_size, held_back),
    )
