"""What a caller gives by mistake: refused before it is sent, by the option's name, and never taken apart."""

import math
from typing import Any

import pytest

from paged.client import Client, chat, generate_request

ANY = (TypeError, ValueError)
CIRCULAR: dict[str, Any] = {}
CIRCULAR["items"] = CIRCULAR


@pytest.mark.parametrize("value", ["Paris", b"Paris", bytearray(b"Paris"), {"Paris": 1}], ids=repr)
@pytest.mark.parametrize("name", ["bad_words", "choice", "allowed_token_ids", "stop_token_ids", "bad_token_sequences"])
def test_a_text_where_a_list_is_due_is_not_taken_apart(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name}: is of type {type(value).__name__}; must be "):
        _asked(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bad_words", [1]),
        ("bad_words", ["\ud800"]),
        ("choice", [1]),
        ("choice", 5),
        ("choice", ["\ud800"]),
        ("stop", [3]),
        ("stop", 3),
        ("stop", b"end"),
        ("stop", "\ud800"),
        ("stop_token_ids", 3),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", [2**40]),
        ("bad_token_sequences", [1]),
        ("bad_token_sequences", ["ab"]),
        ("bad_token_sequences", [[-1]]),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {1: "a"}),
        ("json_schema", {1}),
        ("json_schema", True),
        ("json_schema", 5),
        ("json_schema", [1]),
        ("json_schema", {"enum": {1}}),
        ("json_schema", CIRCULAR),
        ("regex", "\ud800"),
        ("timeout_s", "x"),
        ("timeout_s", math.inf),
        ("timeout_s", math.nan),
        ("prompt", None),
        ("prompt", 5),
        ("prompt", b"Paris"),
        ("prompt", [-1]),
        ("prompt", ["a"]),
        ("prompt", [1.5]),
        ("prompt", "\ud800"),
    ],
    ids=ascii,
)
def test_what_a_message_cannot_hold_is_refused_by_the_name_of_its_option(name: str, value: Any) -> None:
    with pytest.raises(ANY, match=f"^{name}: ") as refused:
        _asked(name, value)
    assert str(refused.value).count(f"{name}:") == 1


@pytest.mark.parametrize("value", [True, 5, [1], {1}], ids=repr)
def test_a_schema_that_is_no_object_is_told_to_be_one(value: Any) -> None:
    with pytest.raises(TypeError, match="must be an object"):
        generate_request("x", json_schema=value)


@pytest.mark.parametrize(
    "message",
    ["hello", "ab", b"ab", 5, None, ("user",), ("user", 5), ("a", "b", "c"), {"role": "user"}, ("user", "\ud800")],
    ids=ascii,
)
def test_a_message_of_a_chat_that_is_no_pair_is_refused_by_its_place(message: Any) -> None:
    with pytest.raises(ANY, match=r"^chat: message 1: "):
        chat(("user", "hi"), message)


async def test_the_other_calls_refuse_by_name_too(client: Client) -> None:
    calls = {
        "prompt": [client.tokenize(5), client.tokenize([1]), client.tokenize("\ud800")],  # type: ignore[arg-type]
        "token_ids": [client.detokenize("12"), client.detokenize(5), client.detokenize([-1])],  # type: ignore[arg-type]
        "request_ids": [client.abort("abc"), client.abort([1])],  # type: ignore[list-item]
        "timeout_s": [client.complete("x", timeout_s="x")],  # type: ignore[typeddict-item]
    }
    for name, wrong in calls.items():
        for call in wrong:
            with pytest.raises(ANY, match=f"^{name}: "):
                await call


def test_any_iterable_is_a_list_even_one_that_can_be_read_only_once() -> None:
    request = generate_request(
        iter([1, 2]),  # type: ignore[arg-type]
        stop_token_ids=iter([3]),  # type: ignore[typeddict-item]
        allowed_token_ids={4},  # type: ignore[typeddict-item]
        bad_words=(word for word in ("a", "b")),  # type: ignore[typeddict-item]
        json_schema={"type": "null"},
    )
    assert list(request.token_ids.ids) == [1, 2]
    assert list(request.stop.token_ids) == [3]
    assert list(request.sampling.allowed_token_ids) == [4]
    assert list(request.sampling.bad_words) == ["a", "b"]


@pytest.mark.parametrize(
    "name", ["logit_bias", "bad_words", "stop", "json_schema", "choice", "timeout_s", "max_tokens"]
)
def test_an_option_that_is_none_is_left_out(name: str) -> None:
    assert generate_request("x", **{name: None}) == generate_request("x")  # type: ignore[misc]


def _asked(name: str, value: Any) -> None:
    if name == "prompt":
        generate_request(value)
    else:
        generate_request("x", **{name: value})  # type: ignore[misc]
