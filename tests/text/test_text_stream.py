"""A sequence's text ends with the token that completes a stop string: C5.3, C5.4, C5.5, C4.3."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.text.text_stream import TextStream
from tests.text.test_detokenizer import expected, in_groups_of, tokenizer_of

KINDS = pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_strip", "word_piece"])


def read(stream: TextStream, groups: list[list[int]]) -> tuple[str, str | None, int]:
    """Text, stop string, and tokens that belong to the answer, as an engine would collect them."""
    text, used = "", 0
    for group in groups:
        piece = stream.push(group)
        text, used = text + piece.text, used + piece.num_tokens_used
        if piece.stop_string is not None:
            return text, piece.stop_string, used
    last = stream.finish()
    return text + last.text, last.stop_string, used


@KINDS
@given(data=st.data(), include=st.booleans(), min_tokens=st.integers(0, 4))
@settings(max_examples=250, deadline=None)
def test_the_result_does_not_depend_on_how_tokens_are_grouped(
    kind: str, data: st.DataObject, include: bool, min_tokens: int
) -> None:
    tokenizer = tokenizer_of(kind)
    ids = st.integers(0, tokenizer.vocab_size - 1)
    prompt = data.draw(st.lists(ids, max_size=4))
    groups = data.draw(st.lists(st.lists(ids, max_size=5), max_size=8))
    stops = data.draw(st.lists(st.sampled_from(["a", "e ", "on", "\ufffd", " ", "the", "😀"]), min_size=1, max_size=3))
    output = [token for group in groups for token in group]

    def result(groups: list[list[int]]) -> tuple[str, str | None, int]:
        return read(TextStream(tokenizer, prompt, stops, include, min_tokens), groups)

    text, found, used = result(groups)
    assert (text, found, used) == result(in_groups_of(1, output)) == result([output])
    whole = expected(tokenizer, prompt, output[:used], True)
    if found is None:
        assert used == len(output)
        assert text == whole
        assert len(output) <= min_tokens or min_tokens or not any(stop in whole for stop in stops)
    else:
        assert used >= min(min_tokens + 1, len(output))
        assert whole.startswith(text if include else text + found)
        # Without its last token, the text had no stop string yet; an unfinished character at its end is not one.
        before = expected(tokenizer, prompt, output[: used - 1], True).rstrip("\ufffd")
        assert min_tokens or not any(stop in before for stop in stops)


@KINDS
def test_tokens_after_the_one_that_completes_a_stop_string_are_not_used(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("the quick brown fox jumps", add_special_tokens=False)
    shortest = next(n for n in range(len(ids)) if "row" in expected(tokenizer, [0], ids[:n], True))
    for groups in ([ids], in_groups_of(1, ids), in_groups_of(2, ids)):
        text, found, used = read(TextStream(tokenizer, [0], ["row"]), groups)
        assert (text.lstrip(), found, used) == ("the quick b", "row", shortest)


@KINDS
def test_nothing_follows_a_stop_string(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("the quick fox", add_special_tokens=False)
    stream = TextStream(tokenizer, [0], ["quick"])
    assert stream.push(ids).stop_string == "quick"
    assert stream.push(ids) == ("", "quick", 0)
    assert stream.finish() == ("", "quick", 0)


def test_a_stop_string_made_of_byte_tokens_ends_the_text_at_once() -> None:
    tokenizer = tokenizer_of("byte_fallback")
    ids = tokenizer.encode("a😀b", add_special_tokens=False)
    stream = TextStream(tokenizer, [0], ["😀"])
    pieces = [stream.push([token]) for token in ids[:5]]
    assert [piece.stop_string for piece in pieces] == [None, None, None, None, "😀"]
    assert "".join(piece.text for piece in pieces) == "a"


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens() -> None:
    tokenizer = tokenizer_of("byte_fallback")
    newline = 4 + 0x0A
    for min_tokens in range(4):
        stream = TextStream(tokenizer, [0], ["\n"], min_tokens=min_tokens)
        assert read(stream, [[newline] * 6]) == ("\n" * min_tokens, "\n", min_tokens + 1)


def test_an_answer_shorter_than_min_tokens_is_delivered_whole() -> None:
    tokenizer = tokenizer_of("byte_level")
    ids = tokenizer.encode("fox")
    stream = TextStream(tokenizer, [0], ["fox"], min_tokens=50)
    assert read(stream, [ids]) == ("fox", None, len(ids))


@KINDS
def test_held_back_text_arrives_when_the_answer_ends(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("the fox", add_special_tokens=False)
    text, found, _ = read(TextStream(tokenizer, [0], ["foxes"]), in_groups_of(1, ids))
    assert (text.lstrip(), found) == ("the fox", None)
