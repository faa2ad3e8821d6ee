"""Every bad field is refused by name before anything is queued (C4.1, C6.8, C10.3)."""

import math
from typing import Any

import pytest

from paged.client import chat, generate_request
from paged.v1 import inference_pb2
from scheduler_svc.api import validation
from scheduler_svc.api.accepted import generation_request
from scheduler_svc.core.sequence import Sampling
from scheduler_svc.errors import InvalidRequest, ModelNotFound

LIMITS = validation.Limits(
    model="tiny", vocab_size=512, max_model_len=64, max_logprobs=20, max_samples=8, max_message_bytes=8192
)
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def violations(request: inference_pb2.GenerateRequest, *, has_chat_template: bool = True) -> dict[str, str]:
    """Descriptions by field; empty for an acceptable request."""
    try:
        validation.check_generate(request, LIMITS, has_chat_template=has_chat_template)
    except InvalidRequest as error:
        return {violation.field: violation.description for violation in error.violations}
    return {}


def bad_fields(prompt: Any = "hello", **options: Any) -> list[str]:
    return list(violations(generate_request(prompt, **options)))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[(name, bad) for name in FLOATS for bad in (math.nan, math.inf, -math.inf)],
        *[(name, -1e-6) for name in ("temperature", "top_p", "min_p", "repetition_penalty")],
        ("temperature", 100.5),
        ("temperature", 1e4),
        ("top_p", 0.0),
        ("top_p", 1.001),
        ("min_p", 1.001),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-38),
        ("repetition_penalty", 10.5),
        ("presence_penalty", -2.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", 2.1),
    ],
)
def test_a_sampling_value_outside_its_range_is_refused_by_name(option: str, value: float) -> None:
    assert bad_fields(**{option: value}) == [f"sampling.{option}"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("temperature", value) for value in (0.0, 1e-45, 1e-38, 1e-6, 1e-2, 100.0)],
        *[("top_p", value) for value in (1e-9, 1.0)],
        *[("top_k", value) for value in (0, 1, 511, 512, 513, 2**31 - 1, 2**32 - 1)],
        *[("min_p", value) for value in (0.0, 1.0)],
        *[("repetition_penalty", value) for value in (0.5, 10.0)],
        *[("presence_penalty", value) for value in (-2.0, 2.0)],
        *[("frequency_penalty", value) for value in (-2.0, 2.0)],
        *[("seed", value) for value in (0, 2**64 - 1)],
        *[("max_tokens", value) for value in (1, 2**31, 2**32 - 1)],
        *[("logprobs", value) for value in (0, 20)],
        ("min_tokens", 63),
        ("stop", ["x"] * 16),
        ("stop", ["é" * 512]),
        ("stop_token_ids", list(range(64))),
        ("stop_token_ids", [511]),
        ("cache_salt", "s" * 256),
        ("cache_salt", "\0é"),
        *[("priority", value) for value in (-10, 10)],
        ("tenant", "a b~" + "x" * 124),
        ("prefix_cache_bypass", True),
        ("request_id", "a b~" + "x" * 124),
        ("model", "tiny"),
    ],
)
def test_a_value_at_the_edge_of_its_range_is_taken(option: str, value: Any) -> None:
    assert bad_fields(**{option: value}) == []


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("max_tokens", 0, "stop.max_tokens"),
        ("min_tokens", 64, "stop.min_tokens"),
        ("logprobs", 21, "logprobs"),
        ("logprobs", 2**32 - 1, "logprobs"),
        ("stop", [""], "stop.strings[0]"),
        ("stop", ["a", "b", "c", "x" * 1025], "stop.strings[3]"),
        ("stop", ["é" * 513], "stop.strings[0]"),
        ("stop", ["x"] * 17, "stop.strings"),
        ("stop", ["x"] * 5000, "stop.strings"),
        ("stop_token_ids", [0, 512], "stop.token_ids[1]"),
        ("stop_token_ids", [2**32 - 1], "stop.token_ids[0]"),
        ("stop_token_ids", [1] * 65, "stop.token_ids"),
        ("cache_salt", "s" * 257, "cache_salt"),
        ("cache_salt", "é" * 129, "cache_salt"),
        ("request_id", "x" * 129, "request_id"),
        ("request_id", "x" * 1_000_000, "request_id"),
        ("request_id", "line\nbreak", "request_id"),
        ("request_id", "nul\0", "request_id"),
        ("request_id", "é", "request_id"),
        ("request_id", "\x7f", "request_id"),
        ("tenant", "x" * 129, "tenant"),
        ("tenant", "é", "tenant"),
        ("priority", 11, "priority"),
        ("priority", -11, "priority"),
        ("priority", 2**31 - 1, "priority"),
    ],
)
def test_a_bad_value_is_refused_by_the_path_of_its_field(option: str, value: Any, field: str) -> None:
    assert bad_fields(**{option: value}) == [field]


def test_min_tokens_may_equal_but_not_pass_max_tokens() -> None:
    assert bad_fields(max_tokens=5, min_tokens=5) == []
    assert bad_fields(max_tokens=5, min_tokens=6) == ["stop.min_tokens"]


def test_min_tokens_beyond_the_models_length_is_refused_whatever_max_tokens_is() -> None:
    assert bad_fields(max_tokens=1000, min_tokens=64) == ["stop.min_tokens"]


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([], "token_ids"),
        ([0] * 64, "token_ids"),
        ([0] * 1000, "token_ids"),
        ([5, 512], "token_ids.ids[1]"),
        ([2**32 - 1], "token_ids.ids[0]"),
        (chat(), "chat.messages"),
        (chat(("user", "hi"), ("", "there")), "chat.messages[1].role"),
    ],
)
def test_a_prompt_that_cannot_be_computed_is_refused(prompt: Any, field: str) -> None:
    assert bad_fields(prompt) == [field]


def test_the_longest_prompt_leaves_room_for_one_token() -> None:
    assert bad_fields([0] * 63) == []


def test_a_missing_prompt_is_refused() -> None:
    assert list(violations(inference_pb2.GenerateRequest())) == ["prompt"]


def test_a_chat_is_refused_where_the_model_has_no_template() -> None:
    assert list(violations(generate_request(chat(("user", "hi"))), has_chat_template=False)) == ["chat"]


def test_another_models_name_is_not_found() -> None:
    with pytest.raises(ModelNotFound, match="tiny"):
        validation.check_generate(generate_request("hi", model="huge"), LIMITS, has_chat_template=True)


def test_all_violations_of_a_request_are_named_at_once() -> None:
    request = generate_request(
        [600], temperature=-1, top_p=2, max_tokens=0, stop=["", "fine", ""], stop_token_ids=[999], logprobs=99
    )
    assert list(violations(request)) == [
        "token_ids.ids[0]",
        "sampling.temperature",
        "sampling.top_p",
        "stop.max_tokens",
        "stop.strings[0]",
        "stop.strings[2]",
        "stop.token_ids[0]",
        "logprobs",
    ]


def test_many_bad_ids_become_a_few_violations() -> None:
    request = inference_pb2.DetokenizeRequest(token_ids=[1000] * 60)
    with pytest.raises(InvalidRequest) as caught:
        validation.check_detokenize(request, LIMITS)
    assert len(caught.value.violations) == validation.MAX_VIOLATIONS_PER_LIST


def test_a_description_names_value_and_limit_but_never_repeats_text() -> None:
    described = violations(generate_request("hi", stop=["marker" * 200], temperature=101))
    assert "101" in described["sampling.temperature"]
    assert "[0, 100]" in described["sampling.temperature"]
    assert "1200" in described["stop.strings[0]"]
    assert "marker" not in str(described)


def test_an_empty_tokenized_prompt_is_refused_by_the_field_it_came_from() -> None:
    with pytest.raises(InvalidRequest) as caught:
        validation.check_prompt_ids("text", [], LIMITS)
    assert [violation.field for violation in caught.value.violations] == ["text"]


def test_a_text_with_a_token_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="gives token 512") as caught:
        validation.check_prompt_ids("text", [3, 512], LIMITS)
    assert [violation.field for violation in caught.value.violations] == ["text"]


def test_unset_fields_become_the_documented_defaults() -> None:
    request = generation_request(generate_request("hi"), [1], LIMITS)
    seed = request.sampling.seed
    assert request.sampling == Sampling(temperature=1, top_p=1, top_k=0, min_p=0, repetition_penalty=1, seed=seed)
    assert request.max_tokens is None
    assert request.sampling.logprobs is None


def test_zero_is_not_the_same_as_unset() -> None:
    request = generation_request(generate_request("hi", temperature=0, seed=0, logprobs=0), [1], LIMITS)
    assert request.sampling.temperature == 0
    assert request.sampling.seed == 0
    assert request.sampling.logprobs == 0


def test_every_option_reaches_the_engine() -> None:
    options: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.75,
        "seed": 2**63,
        "min_tokens": 3,
        "logprobs": 2,
    }
    message = generate_request(
        "hi",
        **options,
        max_tokens=9,
        stop=["a", "b"],
        stop_token_ids=[4],
        ignore_eos=True,
        include_stop_string=True,
        cache_salt="salt",
        request_id="mine",
    )
    request = generation_request(message, [1, 2], LIMITS)
    assert request.sampling == Sampling(**options)
    assert (request.request_id, request.prompt_ids, request.max_tokens) == ("mine", [1, 2], 9)
    assert (request.stop_strings, request.stop_token_ids) == (("a", "b"), (4,))
    assert (request.ignore_eos, request.include_stop_string, request.cache_salt) == (True, True, "salt")


def test_a_top_k_of_the_whole_vocabulary_is_off() -> None:
    kept = [generation_request(generate_request("x", top_k=k), [1], LIMITS).sampling.top_k for k in (511, 512)]
    assert kept == [511, 0]


def test_requests_without_id_or_seed_get_different_ones() -> None:
    made = [generation_request(generate_request("x"), [1], LIMITS) for _ in range(100)]
    assert len({request.request_id for request in made}) == 100
    assert len({request.sampling.seed for request in made}) == 100


def test_lists_that_could_hold_up_the_event_loop_are_bounded() -> None:
    with pytest.raises(InvalidRequest) as caught:
        validation.check_detokenize(inference_pb2.DetokenizeRequest(token_ids=[1] * 65), LIMITS)
    assert [violation.field for violation in caught.value.violations] == ["token_ids"]
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user")] * 4097)
    with pytest.raises(InvalidRequest) as caught:
        validation.check_tokenize(inference_pb2.TokenizeRequest(chat=chat), LIMITS, has_chat_template=True)
    assert [violation.field for violation in caught.value.violations] == ["chat.messages"]


def test_an_answer_that_could_be_too_large_for_one_message_is_refused_before_it_is_computed() -> None:
    def ask(**changes: bool) -> inference_pb2.GenerateRequest:
        return inference_pb2.GenerateRequest(logprobs=20, **changes)

    validation.check_one_message(ask(), 1, LIMITS)
    validation.check_one_message(ask(stream=True), 1, LIMITS)
    validation.check_one_message(ask(stream=False), 32, LIMITS)
    with pytest.raises(InvalidRequest) as caught:
        validation.check_one_message(ask(stream=False), 1, LIMITS)
    assert [violation.field for violation in caught.value.violations] == ["stream"]


def test_defaults_of_the_model_stand_where_a_request_says_nothing_and_only_there() -> None:
    defaults = {"temperature": 0.5, "top_k": 7.0, "repetition_penalty": 1.25}

    def sampling(**options: Any) -> Sampling:
        request = generate_request("x", **options)
        return generation_request(request, [1], LIMITS, (), defaults).sampling

    unset, given = sampling(), sampling(temperature=0, top_k=0, repetition_penalty=1)
    assert (unset.temperature, unset.top_k, unset.repetition_penalty, unset.top_p) == (0.5, 7, 1.25, 1.0)
    assert (given.temperature, given.top_k, given.repetition_penalty) == (0.0, 0, 1.0)
