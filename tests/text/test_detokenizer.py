"""Streamed text is what decoding the whole gives: C5.1, C5.2, C5.4."""

import functools

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from scheduler_svc.text.decoders import MAX_HELD_BYTES
from scheduler_svc.text.detokenizer import Detokenizer
from scheduler_svc.text.tokenizer import Tokenizer
from scheduler_svc.text.window_decoder import WindowDecoder
from tests.text.models import HARD_TEXT, KINDS, SPECIAL, bundle_of

ALL_KINDS = pytest.mark.parametrize("kind", sorted(KINDS))


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer.from_bundle(bundle_of(KINDS[kind]))


def expected(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool) -> str:
    """The rule, word for word: decode(prompt + output) without what it shares with decode(prompt)."""
    whole, begin = tokenizer.decode(prompt + output, skip), tokenizer.decode(prompt, skip)
    shared = 0
    while shared < min(len(whole), len(begin)) and whole[shared] == begin[shared]:
        shared += 1
    return whole[shared:]


def streamed(tokenizer: Tokenizer, prompt: list[int], groups: list[list[int]], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    return [*(detokenizer.push(group) for group in groups), detokenizer.finish()]


def in_groups_of(size: int, ids: list[int]) -> list[list[int]]:
    return [ids[i : i + size] for i in range(0, len(ids), size)]


@ALL_KINDS
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_random_tokens_in_random_groups_give_the_text_of_the_whole(kind: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = tokenizer_of(kind)
    ids = st.integers(0, tokenizer.vocab_size + 2)
    prompt = data.draw(st.lists(ids, max_size=12))
    groups = data.draw(st.lists(st.lists(ids, max_size=6), max_size=12))
    output = [token for group in groups for token in group]
    assert "".join(streamed(tokenizer, prompt, groups, skip)) == expected(tokenizer, prompt, output, skip)
    assert "".join(streamed(tokenizer, prompt, in_groups_of(1, output), skip)) == "".join(
        streamed(tokenizer, prompt, [output], skip)
    )


@pytest.mark.parametrize("kind", ["byte_fallback", "byte_fallback_strip"])
@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_runs_of_byte_tokens_give_the_text_of_the_whole(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    characters = st.text(max_size=3).map(lambda text: [4 + byte for byte in text.encode("utf-8", "ignore")])
    single = st.integers(0, tokenizer.vocab_size - 1).map(lambda token: [token])
    pieces = st.lists(st.one_of(characters, single, st.integers(0, 255).map(lambda byte: [4 + byte])), max_size=6)
    prompt = [token for piece in data.draw(pieces) for token in piece]
    groups = data.draw(pieces)
    output = [token for group in groups for token in group]
    run = max_run(prompt + output)
    if run <= MAX_HELD_BYTES:
        assert "".join(streamed(tokenizer, prompt, groups)) == expected(tokenizer, prompt, output, True)


def max_run(ids: list[int]) -> int:
    longest = run = 0
    for token in ids:
        if token < len(SPECIAL):
            continue  # skipped, so it does not end a run
        run = run + 1 if token < len(SPECIAL) + 256 else 0
        longest = max(longest, run)
    return longest


@ALL_KINDS
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize("skip", [False, True])
def test_no_piece_has_a_broken_character(kind: str, size: int, skip: bool) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(HARD_TEXT)
    prompt = tokenizer.encode("The")
    pieces = streamed(tokenizer, prompt, in_groups_of(size, ids), skip)
    assert "".join(pieces) == expected(tokenizer, prompt, ids, skip)
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_decoder_that_is_not_recognised_gives_whole_characters_too(size: int) -> None:
    library = tokenizers.Tokenizer.from_str(KINDS["byte_fallback"].to_str())
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
    tokenizer = Tokenizer.from_bundle(bundle_of(library))
    assert isinstance(tokenizer.new_decoder(True), WindowDecoder)
    ids = tokenizer.encode("漢字かな交じり" + HARD_TEXT * 3, add_special_tokens=False)
    pieces = streamed(tokenizer, [0], in_groups_of(size, ids))
    assert "".join(pieces) == expected(tokenizer, [0], ids, True)
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("num_in_prompt", [1, 2, 3])
def test_a_character_begun_in_the_prompt_is_delivered_by_the_output(kind: str, num_in_prompt: int) -> None:
    tokenizer = tokenizer_of(kind)
    before = tokenizer.encode("fox", add_special_tokens=False)
    ids = tokenizer.encode("😀", add_special_tokens=False)
    assert len(ids) == 4
    prompt, rest = before + ids[:num_in_prompt], ids[num_in_prompt:]
    assert "".join(streamed(tokenizer, prompt, [rest])) == "😀"
    assert "".join(streamed(tokenizer, prompt, [tokenizer.encode("x", add_special_tokens=False)])) == "x"


@ALL_KINDS
@pytest.mark.parametrize(
    "text", [" a", "  a", "   ", "\n    code", " <tool> b", "a<|mark|> b", "<tool>", "été b", "汉\u00a0b"]
)
@pytest.mark.parametrize("skip", [False, True])
def test_spaces_survive_at_the_first_token_and_around_added_tokens(kind: str, text: str, skip: bool) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    for prompt in ([], [0], [0, 1], tokenizer.encode("fox"), tokenizer.encode("fox ")):
        assert "".join(streamed(tokenizer, prompt, in_groups_of(1, ids), skip)) == expected(
            tokenizer, prompt, ids, skip
        )


def test_a_stream_of_lone_continuation_bytes_does_not_stall() -> None:
    for kind, token in (("byte_level", KINDS["byte_level"].token_to_id("¤")), ("byte_fallback", 4 + 0xA4)):
        detokenizer = Detokenizer(tokenizer_of(kind), [0])
        pieces = [detokenizer.push([token]) for _ in range(100)]
        assert "".join(pieces) == "\ufffd" * 100


def test_a_long_run_of_byte_tokens_is_given_out_before_it_ends() -> None:
    tokenizer = tokenizer_of("byte_fallback")
    text = "漢" * 50
    detokenizer = Detokenizer(tokenizer, [0])
    delivered = 0
    for i, token in enumerate(tokenizer.encode(text, add_special_tokens=False)):
        delivered += len(detokenizer.push([token]))
        assert 3 * delivered > i + 1 - MAX_HELD_BYTES - 3
    assert delivered + len(detokenizer.finish()) == len(text)


def test_the_replacement_character_as_a_text_of_its_own_is_delivered() -> None:
    for kind in ("byte_level", "byte_fallback"):
        tokenizer = tokenizer_of(kind)
        ids = tokenizer.encode("a\ufffd\ufffdb", add_special_tokens=False)
        assert "".join(streamed(tokenizer, [0], in_groups_of(1, ids))) == "a\ufffd\ufffdb"


@ALL_KINDS
def test_ids_outside_the_vocabulary_have_no_text(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("lazy", add_special_tokens=False)
    beyond = [tokenizer.vocab_size + 5, 2**31]
    assert streamed(tokenizer, ids, [beyond]) == ["", ""]
