"""What is asked for: a prompt and options in, the message that is sent out."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

from paged import options as checked
from paged.v1 import inference_pb2

OWN_FIELDS = (
    "request_id",
    "model",
    "logprobs",
    "prompt_logprobs",
    "echo",
    "truncate_prompt_tokens",
    "cache_salt",
    "n",
    "beam",
    "best_of",
    "priority",
    "tenant",
    "prefix_cache_bypass",
)

Prompt = str | Sequence[int] | inference_pb2.Chat


class Options(TypedDict, total=False):
    """What may be said of a generation, named and documented as in inference.proto. What is left out stays unset."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    bad_token_sequences: Sequence[Sequence[int]]
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_string: bool
    logprobs: int
    prompt_logprobs: int
    echo: bool
    truncate_prompt_tokens: int
    cache_salt: str
    prefix_cache_bypass: bool
    priority: int
    tenant: str
    n: int
    beam: inference_pb2.BeamSearch
    best_of: int
    json_schema: str | Mapping[str, Any]  # Of these four, one: fields of `Grammar`.
    regex: str
    choice: Sequence[str]
    lark: str
    model: str
    request_id: str
    timeout_s: float  # The call's deadline.


def chat(*messages: tuple[str, str] | Mapping[str, str]) -> inference_pb2.Chat:
    """A conversation as a prompt, of (role, content) pairs or of dicts with these two keys. Raises TypeError
    or ValueError for a message that is neither."""
    return inference_pb2.Chat(messages=[checked.chat_message(i, message) for i, message in enumerate(messages)])


def generate_request(prompt: Prompt, **options: Unpack[Options]) -> inference_pb2.GenerateRequest:
    """The message that `Client.generate` sends. Raises TypeError for an unknown option, and TypeError or
    ValueError, naming the option, for a value that the message cannot hold. None is as if left out."""
    if unknown := options.keys() - Options.__annotations__.keys():
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    for name, convert in _CONVERTERS.items():
        if name in given:
            given[name] = convert(name, given[name])
    stop = inference_pb2.StopConditions(**picked(given, inference_pb2.StopConditions))
    with checked.named("stop"):
        stop.strings.extend(given.get("stop", ()))
    with checked.named("stop_token_ids"):
        stop.token_ids.extend(given.get("stop_token_ids", ()))
    return inference_pb2.GenerateRequest(
        sampling=inference_pb2.SamplingParams(**picked(given, inference_pb2.SamplingParams)),
        stop=stop,
        **picked({name: given[name] for name in OWN_FIELDS if name in given}, inference_pb2.GenerateRequest),
        grammar=_grammar(given),
        **checked.prompt_field(prompt),
    )


_CONVERTERS: dict[str, Callable[[str, Any], Any]] = {
    "logit_bias": checked.logit_biases,
    "allowed_token_ids": checked.token_ids,
    "bad_words": checked.texts,
    "bad_token_sequences": checked.token_id_lists,
    "stop": checked.text_or_texts,
    "stop_token_ids": checked.token_ids,
    "json_schema": checked.schema,
    "choice": checked.choice,
    "timeout_s": checked.seconds,
}


def _grammar(given: Mapping[str, Any]) -> inference_pb2.Grammar | None:
    kinds = [name for name in inference_pb2.Grammar.DESCRIPTOR.fields_by_name if name in given]
    if len(kinds) > 1:
        raise TypeError(f"{' and '.join(kinds)}: a request has one grammar")
    return inference_pb2.Grammar(**picked(given, inference_pb2.Grammar)) if kinds else None


def picked(given: Mapping[str, Any], message: Any) -> dict[str, Any]:
    """What is given of this class of messages' fields. Raises TypeError or ValueError, naming the field."""
    picked = {name: given[name] for name in message.DESCRIPTOR.fields_by_name if name in given}
    for name, value in picked.items():
        with checked.named(name):
            message(**{name: value})
    return picked
