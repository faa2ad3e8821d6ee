"""What makes a request acceptable. Pure functions.

Every bad field of a request is found and named, so that a client can mend them all at once. Values of text fields are
not repeated in descriptions, only their lengths.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from paged.v1 import executor_pb2, inference_pb2
from scheduler_svc.api.choosing import choosing_violations
from scheduler_svc.api.grammar import grammar_violations
from scheduler_svc.api.token_rules import rule_violations
from scheduler_svc.errors import FieldViolation, InvalidRequest, ModelNotFound
from scheduler_svc.settings import SchedulerSettings

MAX_REQUEST_ID_CHARS = 128
MAX_CACHE_SALT_BYTES = 256
MAX_TENANT_CHARS = 128
MAX_PRIORITY = 10  # and as much below 0
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_CHAT_MESSAGES = 4096
# Most that a message takes for a token, and for each log-probability with its id.
TOKEN_BYTES = 32
LOGPROB_BYTES = 10
# Of one list: a million bad ids must not become a million sentences.
MAX_VIOLATIONS_PER_LIST = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests are measured against: the model's facts, made narrower by settings."""

    model: str
    vocab_size: int
    max_model_len: int
    max_logprobs: int
    max_samples: int
    max_message_bytes: int
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, facts: executor_pb2.ModelFacts, settings: SchedulerSettings) -> "Limits":
        length = min(facts.max_model_len, settings.max_model_len or facts.max_model_len)
        return cls(
            facts.name,
            facts.vocab_size,
            length,
            settings.max_logprobs,
            settings.max_samples,
            settings.max_message_bytes,
            tuple(facts.eos_token_ids),
        )


@dataclass(frozen=True, slots=True)
class _Range:
    low: float
    high: float
    low_included: bool = True

    def __contains__(self, value: float) -> bool:
        above = value >= self.low if self.low_included else value > self.low
        return math.isfinite(value) and above and value <= self.high

    def __str__(self) -> str:
        return f"{'[' if self.low_included else '('}{self.low:g}, {self.high:g}]"


SAMPLING_RANGES = {
    "temperature": _Range(0, 100),
    "top_p": _Range(0, 1, low_included=False),
    "min_p": _Range(0, 1),
    "repetition_penalty": _Range(0.125, 10),
    "presence_penalty": _Range(-2, 2),
    "frequency_penalty": _Range(-2, 2),
}


def check_model(name: str, limits: Limits) -> None:
    """Raises ModelNotFound where `name` is neither empty nor the served one."""
    if name and name != limits.model:
        raise ModelNotFound(f"model {name[:128]!r} is not served here; use {limits.model!r} or leave the field empty")


def check_generate(request: inference_pb2.GenerateRequest, limits: Limits, *, has_chat_template: bool) -> None:
    """Raises ModelNotFound, or InvalidRequest with every violation that shows before the prompt is tokenized."""
    check_model(request.model, limits)
    violations = [
        *_name_violations("request_id", request.request_id, MAX_REQUEST_ID_CHARS),
        *_name_violations("tenant", request.tenant, MAX_TENANT_CHARS),
        *_prompt_violations(request, limits, has_chat_template),
        *_sampling_violations(request.sampling),
        *rule_violations(request.sampling, limits.vocab_size),
        *_stop_violations(request.stop, limits),
        *choosing_violations(request, limits.vocab_size, limits.max_samples, len(limits.eos_token_ids)),
    ]
    violations += _extent_violations(request, limits)
    if request.HasField("n") and not 1 <= request.n <= limits.max_samples:
        violations.append(FieldViolation("n", f"is {request.n}; must be 1 to {limits.max_samples}"))
    violations += grammar_violations(request)
    if abs(request.priority) > MAX_PRIORITY:
        allowed = f"[{-MAX_PRIORITY}, {MAX_PRIORITY}]"
        violations.append(FieldViolation("priority", f"is {request.priority}; must be in {allowed}"))
    if (size := len(request.cache_salt.encode())) > MAX_CACHE_SALT_BYTES:
        violations.append(FieldViolation("cache_salt", f"has {size} bytes, above the limit of {MAX_CACHE_SALT_BYTES}"))
    _raise_if_any(violations)


def check_tokenize(request: inference_pb2.TokenizeRequest, limits: Limits, *, has_chat_template: bool) -> None:
    """Raises ModelNotFound or InvalidRequest."""
    check_model(request.model, limits)
    if request.WhichOneof("prompt") is None:
        _raise_if_any([FieldViolation("prompt", "is missing; set text or chat")])
    if request.WhichOneof("prompt") == "chat":
        _raise_if_any(_chat_violations(request.chat, has_chat_template))


def check_detokenize(request: inference_pb2.DetokenizeRequest, limits: Limits) -> None:
    """Raises ModelNotFound or InvalidRequest."""
    check_model(request.model, limits)
    if (count := len(request.token_ids)) > limits.max_model_len:
        found = f"has {count} entries, above the limit of {limits.max_model_len}, the model's length"
        raise InvalidRequest(FieldViolation("token_ids", found))
    _raise_if_any(_token_id_violations("token_ids", request.token_ids, limits))


def check_prompt_ids(field: str, prompt_ids: Sequence[int], limits: Limits) -> None:
    """Raises InvalidRequest for `field` where the tokenized prompt is empty, leaves no room for an answer, or has a
    token that the model lacks (as a tokenizer may have more of them than the model)."""
    _raise_if_any(_prompt_length_violations(field, len(prompt_ids), limits))
    if (highest := max(prompt_ids)) >= limits.vocab_size:
        found = f"gives token {highest} where the model's vocabulary ends at {limits.vocab_size}; leave that text out"
        raise InvalidRequest(FieldViolation(field, found))


def check_one_message(request: inference_pb2.GenerateRequest, num_prompt: int, limits: Limits) -> None:
    """Raises InvalidRequest for an answer that is asked for as one message and could be too large for one."""
    if not request.HasField("stream") or request.stream:
        return
    longest = limits.max_model_len - num_prompt
    num_tokens = min(request.stop.max_tokens, longest) if request.stop.HasField("max_tokens") else longest
    num_bytes = num_prompt * TOKEN_BYTES if request.echo else 0
    if request.HasField("prompt_logprobs"):
        num_bytes += num_prompt * (TOKEN_BYTES + LOGPROB_BYTES * (request.prompt_logprobs + 1))
    if request.HasField("logprobs"):
        num_bytes += num_tokens * (TOKEN_BYTES + LOGPROB_BYTES * (request.logprobs + 1))
    if num_bytes > limits.max_message_bytes:
        found = f"is false; what is asked for of {num_prompt} + {num_tokens} tokens can take {num_bytes} bytes"
        limit = f"a message has {limits.max_message_bytes} at most: stream the answer, or set a lower stop.max_tokens"
        raise InvalidRequest(FieldViolation("stream", f"{found}, and {limit}"))


def _name_violations(field: str, name: str, most_chars: int) -> list[FieldViolation]:
    if not name:
        return []
    if len(name) > most_chars:
        return [FieldViolation(field, f"has {len(name)} characters, above the limit of {most_chars}")]
    if not (name.isascii() and name.isprintable()):
        return [FieldViolation(field, "holds a character that is not printable ASCII")]
    return []


def _prompt_violations(
    request: inference_pb2.GenerateRequest, limits: Limits, has_chat_template: bool
) -> list[FieldViolation]:
    match request.WhichOneof("prompt"):
        case None:
            return [FieldViolation("prompt", "is missing; set one of text, token_ids and chat")]
        case "token_ids":
            ids = request.token_ids.ids
            used = min(len(ids), request.truncate_prompt_tokens or len(ids))
            too_long_or_empty = _prompt_length_violations("token_ids", used, limits)
            return too_long_or_empty or _token_id_violations("token_ids.ids", ids, limits)
        case "chat":
            return _chat_violations(request.chat, has_chat_template)
        case _:
            return []


def _prompt_length_violations(field: str, num_tokens: int, limits: Limits) -> list[FieldViolation]:
    if num_tokens == 0:
        return [FieldViolation(field, "gives no token; a prompt needs at least one")]
    if num_tokens + 1 > limits.max_model_len:
        most = limits.max_model_len - 1
        return [FieldViolation(field, f"has {num_tokens} tokens, above the limit of {most}; shorten the prompt")]
    return []


def _chat_violations(chat: inference_pb2.Chat, has_chat_template: bool) -> list[FieldViolation]:
    if not has_chat_template:
        return [FieldViolation("chat", "the model has no chat template; render the conversation and send it as text")]
    if not chat.messages:
        return [FieldViolation("chat.messages", "is empty; a conversation needs at least one message")]
    if len(chat.messages) > MAX_CHAT_MESSAGES:
        found = f"has {len(chat.messages)} entries, above the limit of {MAX_CHAT_MESSAGES}"
        return [FieldViolation("chat.messages", found)]
    without_role = (i for i, message in enumerate(chat.messages) if not message.role)
    return [
        FieldViolation(f"chat.messages[{i}].role", 'is empty; use "system", "user" or "assistant"')
        for i in islice(without_role, MAX_VIOLATIONS_PER_LIST)
    ]


def _sampling_violations(sampling: inference_pb2.SamplingParams) -> list[FieldViolation]:
    return [
        FieldViolation(f"sampling.{name}", f"is {getattr(sampling, name):g}; must be in {allowed}")
        for name, allowed in SAMPLING_RANGES.items()
        if sampling.HasField(name) and getattr(sampling, name) not in allowed
    ]


def _extent_violations(request: inference_pb2.GenerateRequest, limits: Limits) -> list[FieldViolation]:
    most, longest = min(limits.max_logprobs, limits.vocab_size), limits.max_model_len - 1
    violations = [
        FieldViolation(name, f"is {getattr(request, name)}, above the limit of {most}")
        for name in ("logprobs", "prompt_logprobs")
        if request.HasField(name) and getattr(request, name) > most
    ]
    if request.HasField("truncate_prompt_tokens") and not 1 <= request.truncate_prompt_tokens <= longest:
        found = f"is {request.truncate_prompt_tokens}; must be 1 to {longest}"
        violations.append(FieldViolation("truncate_prompt_tokens", found))
    return violations


def _stop_violations(stop: inference_pb2.StopConditions, limits: Limits) -> list[FieldViolation]:
    violations = []
    if stop.HasField("max_tokens") and stop.max_tokens == 0:
        violations.append(FieldViolation("stop.max_tokens", "is 0; must be at least 1, or unset for no limit"))
    longest = limits.max_model_len - 1
    most = min(stop.max_tokens, longest) if stop.HasField("max_tokens") else longest
    if stop.min_tokens > most:
        reason = "the model's length allows" if most == longest else "stop.max_tokens allows"
        violations.append(
            FieldViolation("stop.min_tokens", f"is {stop.min_tokens}, more than the {most} that {reason}")
        )
    violations += _stop_string_violations(stop.strings) if stop.strings else []
    return violations + (_stop_token_violations(stop.token_ids, limits) if stop.token_ids else [])


def _stop_string_violations(strings: Sequence[str]) -> list[FieldViolation]:
    if len(strings) > MAX_STOP_STRINGS:
        return [FieldViolation("stop.strings", f"has {len(strings)} entries, above the limit of {MAX_STOP_STRINGS}")]
    return [
        FieldViolation(f"stop.strings[{i}]", f"has {size} bytes; must have 1 to {MAX_STOP_STRING_BYTES}")
        for i, string in enumerate(strings)
        if not 1 <= (size := len(string.encode())) <= MAX_STOP_STRING_BYTES
    ]


def _stop_token_violations(ids: Sequence[int], limits: Limits) -> list[FieldViolation]:
    if len(ids) > MAX_STOP_TOKEN_IDS:
        return [FieldViolation("stop.token_ids", f"has {len(ids)} entries, above the limit of {MAX_STOP_TOKEN_IDS}")]
    return _token_id_violations("stop.token_ids", ids, limits)


def _token_id_violations(field: str, ids: Sequence[int], limits: Limits) -> list[FieldViolation]:
    if not ids or max(ids) < limits.vocab_size:
        return []
    outside = (i for i, token_id in enumerate(ids) if token_id >= limits.vocab_size)
    return [
        FieldViolation(f"{field}[{i}]", f"is {ids[i]}; must be below the vocabulary size of {limits.vocab_size}")
        for i in islice(outside, MAX_VIOLATIONS_PER_LIST)
    ]


def _raise_if_any(violations: Sequence[FieldViolation]) -> None:
    if violations:
        raise InvalidRequest(*violations)
