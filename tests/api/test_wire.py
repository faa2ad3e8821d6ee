"""What is on top of a message is found without reading it, and never something that is not there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.client import chat, generate_request
from paged.v1.inference_pb2 import GenerateRequest
from scheduler_svc.api.wire import without

TEXT = GenerateRequest.TEXT_FIELD_NUMBER


@given(text=st.text(min_size=1, max_size=300), seed=st.integers(0, 2**64 - 1), stop=st.lists(st.text(min_size=1)))
def test_a_message_without_its_text_is_the_same_but_for_that(text: str, seed: int, stop: list[str]) -> None:
    whole = generate_request(text, seed=seed, stop=stop, max_tokens=7, temperature=0.5, logprobs=2, priority=-3)
    whole.request_id, whole.model = "comes before", "the text"
    cut = without(whole.SerializeToString(), TEXT)
    assert cut is not None
    rest, num_bytes = cut
    assert num_bytes == len(text.encode())
    whole.ClearField("prompt")
    assert GenerateRequest.FromString(rest) == whole


@pytest.mark.parametrize(
    "data",
    [
        b"",
        generate_request([1, 2]).SerializeToString(),
        generate_request(chat(("user", "x"))).SerializeToString(),
        2 * generate_request("twice").SerializeToString(),
        generate_request("cut").SerializeToString()[:-1],
        generate_request("x").SerializeToString() + b"\xff" * 11,
        generate_request("x").SerializeToString() + b"\x0b",
        generate_request("many").SerializeToString() + b"\x40\x01" * 1000,
    ],
    ids=["nothing", "ids", "chat", "two texts", "cut short", "an endless number", "a group", "many fields"],
)
def test_where_there_is_not_one_text_or_no_message_nothing_is_found(data: bytes) -> None:
    assert without(data, TEXT) is None


@given(data=st.binary(max_size=60))
def test_no_bytes_are_taken_for_longer_than_they_are(data: bytes) -> None:
    cut = without(data, TEXT)
    if cut is not None:
        rest, length = cut
        assert len(rest) + length < len(data)
