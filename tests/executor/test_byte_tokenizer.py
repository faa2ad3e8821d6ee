"""The simulated model's tokenizer: bytes in, readable text out, the same bundle every time."""

import io
import json
import zipfile

import pytest
from tokenizers import Tokenizer

from executor_svc.simulated.byte_tokenizer import BOS_ID, EOS_ID, make_bundle

VOCAB = 32000


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    archive = zipfile.ZipFile(io.BytesIO(make_bundle(VOCAB, 4096, EOS_ID)))
    return {name: archive.read(name).decode() for name in archive.namelist()}


@pytest.fixture(scope="module")
def tokenizer(files: dict[str, str]) -> Tokenizer:
    return Tokenizer.from_str(files["tokenizer.json"])


@pytest.mark.parametrize("text", ["", "plain aa ab", "grüße 你好 🙂\n\t", "\x00\x7f  two  spaces ", "a" * 500])
def test_text_becomes_its_bytes_after_a_begin_token_and_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert ids == [BOS_ID, *text.encode()]
    assert tokenizer.decode(ids) == text


def test_special_tokens_are_found_in_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<s>x</s>", add_special_tokens=False).ids == [BOS_ID, ord("x"), EOS_ID]


def test_every_id_has_a_text_of_its_own(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == VOCAB
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(VOCAB)]
    assert all(texts)
    words = texts[258:]
    assert len(set(words)) == len(words)
    assert all(word[0] == " " and word[1:].isalpha() for word in words)


def test_equal_settings_give_equal_bytes() -> None:
    assert make_bundle(300, 100, EOS_ID) == make_bundle(300, 100, EOS_ID)
    assert make_bundle(300, 100, EOS_ID) != make_bundle(301, 100, EOS_ID)


def test_configs_name_the_end_token_and_a_chat_template(files: dict[str, str]) -> None:
    assert json.loads(files["generation_config.json"])["eos_token_id"] == EOS_ID
    assert json.loads(files["config.json"])["vocab_size"] == VOCAB
    assert "message['content']" in json.loads(files["tokenizer_config.json"])["chat_template"]
