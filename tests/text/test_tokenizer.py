"""What a prompt costs is known before it is tokenized, and tokenizing holds up nobody: C7.10, C10.3."""

import functools
import threading
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from scheduler_svc.errors import InvalidRequest
from scheduler_svc.text.tokenizer import Tokenizer
from tests.text.models import KINDS
from tests.text.test_detokenizer import ALL_KINDS, tokenizer_of


@ALL_KINDS
@given(text=st.one_of(st.text(), st.text(alphabet=" ▁\u0301eaZ<s>tool\n", max_size=200)))
@settings(max_examples=100, deadline=None)
def test_a_text_never_has_fewer_tokens_than_the_bound(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    num_tokens = len(tokenizer.encode(text))
    assert num_tokens >= tokenizer.lower_bound_tokens(text) >= tokenizer.lower_bound_of_bytes(len(text.encode()))


def test_the_bound_holds_where_characters_are_composed() -> None:
    composed, decomposed = "\u1f82", "\u03b1\u0313\u0300\u0345"
    library = tokenizers.Tokenizer.from_str(KINDS["byte_fallback"].to_str())
    library.normalizer = normalizers.NFC()
    library.add_tokens([AddedToken(composed * 100)])
    tokenizer = Tokenizer(library, None)
    assert len(tokenizer.encode(decomposed * 100, add_special_tokens=False)) == 1
    assert tokenizer.lower_bound_tokens(decomposed * 100) == 1


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_strip"])
def test_a_prompt_of_20_mb_is_known_to_be_too_long_for_4k_tokens(kind: str) -> None:
    assert tokenizer_of(kind).lower_bound_tokens("a" * 20_000_000) > 4096
    assert tokenizer_of(kind).lower_bound_of_bytes(20_000_000) > 4096


def test_the_bound_holds_where_ids_have_holes_between_them() -> None:
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = tokenizers.Tokenizer(
        models.BPE(vocab=vocab | {"aa": 400, "aaaa": 90_000}, merges=[("a", "a"), ("aa", "aa")])
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(library, None)
    assert tokenizer.encode("a" * 400) == [90_000] * 100
    assert tokenizer.lower_bound_tokens("a" * 400) == 100


def test_there_is_no_bound_where_not_all_tokens_are_found() -> None:
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab | {"aa": 1 << 31}, merges=[("a", "a")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert Tokenizer(library, None).lower_bound_tokens("a" * 400) == 0


@given(text=st.text(alphabet=" \n\t\u3000\xa0<mask>x", max_size=100))
@settings(max_examples=200, deadline=None)
def test_the_bound_holds_where_special_tokens_swallow_spaces(text: str) -> None:
    tokenizer = swallower()
    text = text.replace("x", "<mask>")
    assert len(tokenizer.encode(text)) >= tokenizer.lower_bound_tokens(text)


def test_spaces_that_a_special_token_swallows_do_not_count() -> None:
    text = " " * 1000 + "<mask>" + "\u3000\n" * 1000
    assert len(swallower().encode(text)) == 1
    assert swallower().lower_bound_tokens(text) == 1
    assert swallower().lower_bound_of_bytes(len(text.encode())) == 0
    assert swallower().lower_bound_tokens("a" * 20_000_000) > 4096


@functools.cache
def swallower() -> Tokenizer:
    library = tokenizers.Tokenizer.from_str(KINDS["byte_level"].to_str())
    library.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    return Tokenizer(library, None)


@pytest.mark.parametrize("kind", ["word_piece", "metaspace"])
def test_there_is_no_bound_where_an_unknown_word_is_one_token(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    text = "漢" * 10_000
    assert tokenizer.lower_bound_tokens(text) <= len(tokenizer.encode(text)) < 10


def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    tokenizer = tokenizer_of("byte_level")
    text = "the quick brown fox " * 100_000
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        tokenizer.encode(text)
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    turns = 0
    deadline = time.monotonic() + 60
    while not ended.wait(0.001) and time.monotonic() < deadline:
        turns += 1
    thread.join(60)
    assert turns > 20


def test_a_text_that_the_vocabulary_cannot_write_is_a_bad_request() -> None:
    library = tokenizers.Tokenizer(models.Unigram([("a", -1.0), ("b", -2.0)], unk_id=None))
    tokenizer = Tokenizer(library, None)
    assert tokenizer.encode("ab") == [0, 1]
    with pytest.raises(InvalidRequest, match="text: the model's tokenizer cannot encode it"):
        tokenizer.encode("abc")


@ALL_KINDS
def test_the_size_of_the_vocabulary_counts_added_tokens(kind: str) -> None:
    assert tokenizer_of(kind).vocab_size == len(KINDS[kind].get_vocab(with_added_tokens=True))


def test_a_chat_without_a_template_is_a_bad_request() -> None:
    with pytest.raises(InvalidRequest, match="chat: the model has no chat template"):
        tokenizer_of("byte_level").encode_chat([{"role": "user", "content": "hi"}])
