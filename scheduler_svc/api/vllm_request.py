"""A request to VllmEngine in the words of our own API, which then says what is wrong with it.

In that API 0 mostly means unset. `spaces_between_special_tokens` and `skip_special_tokens` concern the caller's own
text, and `grammar_from_first_token` is how grammars always are here.
"""

import json
from collections.abc import Iterator

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from paged.v1 import inference_pb2
from scheduler_svc.errors import FieldViolation, InvalidRequest

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_SET_UNLESS_ZERO = ("top_p", "top_k", "min_p", *_PENALTIES)
_COUNTS = ("logprobs", "prompt_logprobs", "truncate_prompt_tokens")
# Fields of what is not done here: images, and K/V that another engine has computed.
_NOT_DONE = (
    "kv_transfer_params",
    "kv_transfer_params_json",
    "mm_inputs",
    "extra_mm_inputs",
    "media_refs",
)
_ANY_OBJECT = json.dumps({"type": "object"})


def our_request(request: vllm.GenerateRequest, model: str) -> inference_pb2.GenerateRequest:
    """Raises InvalidRequest for what cannot be said in it."""
    violations = list(_violations(request))
    if violations:
        raise InvalidRequest(*violations)
    given = request.sampling_params
    ours = inference_pb2.GenerateRequest(
        request_id=request.request_id,
        model=model,
        sampling=_sampling(given),
        stop=_stop(given),
        stream=request.stream,
        n=given.n or None,
        grammar=_grammar(given),
        **{name: getattr(given, name) for name in _COUNTS if given.HasField(name)},
    )
    if request.WhichOneof("input") == "text":
        ours.text = request.text
    elif request.WhichOneof("input") == "tokenized":
        ours.token_ids.ids.extend(request.tokenized.input_ids)
    return ours


def _violations(request: vllm.GenerateRequest) -> Iterator[FieldViolation]:
    for field, _ in request.ListFields():
        if field.name in _NOT_DONE:
            yield FieldViolation(field.name, "is not supported here; leave it unset")
    if request.data_parallel_rank:
        yield FieldViolation("data_parallel_rank", f"is {request.data_parallel_rank}; there is rank 0 alone")
    given = request.sampling_params
    for name in _COUNTS:
        if given.HasField(name) and getattr(given, name) < 0:
            found = f"is {getattr(given, name)}; say how many, or leave it unset"
            yield FieldViolation(f"sampling_params.{name}", found)
    if given.WhichOneof("constraint") == "structural_tag":
        yield FieldViolation("sampling_params.structural_tag", "is not supported; use json_schema or a grammar")
    if any(token_id < 0 for token_id in given.logit_bias):
        yield FieldViolation("sampling_params.logit_bias", "names a token below 0")


def _sampling(given: vllm.SamplingParams) -> inference_pb2.SamplingParams:
    ours = inference_pb2.SamplingParams(
        temperature=given.temperature if given.HasField("temperature") else None,
        seed=given.seed % (1 << 64) if given.HasField("seed") else None,
        **{name: getattr(given, name) or None for name in _SET_UNLESS_ZERO},
    )
    for token_id, bias in given.logit_bias.items():
        ours.logit_bias.add(token_id=token_id, bias=bias)
    return ours


def _stop(given: vllm.SamplingParams) -> inference_pb2.StopConditions:
    return inference_pb2.StopConditions(
        max_tokens=given.max_tokens if given.HasField("max_tokens") else None,
        min_tokens=given.min_tokens or None,
        strings=given.stop,
        token_ids=given.stop_token_ids,
        ignore_eos=given.ignore_eos,
        include_stop_string=given.include_stop_str_in_output,
    )


def _grammar(given: vllm.SamplingParams) -> inference_pb2.Grammar | None:
    match given.WhichOneof("constraint"):
        case "json_schema":
            return inference_pb2.Grammar(json_schema=given.json_schema)
        case "regex":
            return inference_pb2.Grammar(regex=given.regex)
        case "grammar":
            return inference_pb2.Grammar(lark=given.grammar)
        case "json_object" if given.json_object:
            return inference_pb2.Grammar(json_schema=_ANY_OBJECT)
        case "choice":
            return inference_pb2.Grammar(choice=inference_pb2.Choice(options=given.choice.choices))
        case _:
            return None
