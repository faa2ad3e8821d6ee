"""From a directory to the scheduler's ids: those that transformers gives, with one begin token or none: C8.9."""

import json

import pytest
from transformers import AutoTokenizer

from executor_svc.model.bundle import make_bundle
from scheduler_svc.text.tokenizer import Tokenizer
from tests.text.models import HARD_TEXT, KINDS
from tests.text.test_against_transformers import TEMPLATES, TURNS

# Some of these build their own rules around the vocabulary of tokenizer.json; `None` is the plain one.
CLASSES = [None, "LlamaTokenizer", "LlamaTokenizerFast", "GemmaTokenizer", "GPT2Tokenizer", "Qwen2TokenizerFast"]
TEXTS = ("fox", " fox", "<s>fox", "<s> fox</s>", "", " a  b", "x <tool> y", "<s><s>", HARD_TEXT)
CHATS = (TURNS, TURNS[:2], TURNS[1:2], [{"role": "user", "content": "<s>again"}])


def both(directory, kind, **config):
    """The tokenizer as the scheduler has it, and as transformers does."""
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **config}
    (directory / "tokenizer.json").write_text(KINDS[kind].to_str())
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text("{}")
    theirs = AutoTokenizer.from_pretrained(directory)
    return Tokenizer.from_bundle(make_bundle(directory, theirs)), theirs


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_strip"])
@pytest.mark.parametrize("tokenizer_class", CLASSES)
@pytest.mark.parametrize("options", [{}, {"add_bos_token": False}], ids=str)
def test_a_text_has_the_ids_that_transformers_gives_whatever_class_its_tokenizer_is_of(
    tmp_path, kind, tokenizer_class, options
):
    ours, theirs = both(tmp_path, kind, tokenizer_class=tokenizer_class or "PreTrainedTokenizerFast", **options)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("tokenizer_class", CLASSES)
@pytest.mark.parametrize("template", ["headers", "tagged_lines"])
def test_a_chat_has_the_ids_that_transformers_gives_whether_text_gets_a_begin_token_or_not(
    tmp_path, kind, tokenizer_class, template
):
    ours, theirs = both(
        tmp_path, kind, tokenizer_class=tokenizer_class or "PreTrainedTokenizerFast", chat_template=TEMPLATES[template]
    )
    for turns in CHATS:
        wanted = theirs.apply_chat_template(turns, tokenize=True, add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(turns) == wanted
        written = sum(turn["content"].count("<s>") for turn in turns)
        assert wanted.count(theirs.bos_token_id) == TEMPLATES[template].count("bos_token") + written


@pytest.mark.parametrize("tokenizer_class", [None, "LlamaTokenizer"])
def test_a_longer_chat_begins_with_the_ids_of_the_shorter_so_that_its_prefix_is_found(tmp_path, tokenizer_class):
    template = TEMPLATES["headers"]
    ours, _ = both(
        tmp_path, "byte_level", tokenizer_class=tokenizer_class or "PreTrainedTokenizerFast", chat_template=template
    )
    short = ours.encode_chat(TURNS[:2])
    answer = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]
    assert ours.encode_chat([*TURNS[:2], *answer])[: len(short)] == short
