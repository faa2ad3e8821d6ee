"""Prompts become the ids that transformers makes of them: C8.9."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from scheduler_svc.text.tokenizer import Tokenizer
from tests.text.models import HARD_TEXT, KINDS, bundle_of

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  Why is the sky blue? <b>\"&'é😀</b>\n"},
    {"role": "assistant", "content": "Rayleigh."},
    {"role": "user", "content": "And </s> at night?"},
]

TEMPLATES = {
    "headers": """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|stop|>\n\n' + message['content'] | trim + '<|mark|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|stop|>\n\n' }}
{%- endif %}""",
    "tagged_lines": """{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
<|mark|>system
You help.<|mark|>
    {% endif %}
<|mark|>{{ message.role }}
{{ message.content }}<|mark|>
{% endfor %}
{% if add_generation_prompt %}
<|mark|>assistant
{% endif %}""",
    "system_in_first_turn": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] %}{% set turns = messages[1:] %}
{%- else %}{% set system = '' %}{% set turns = messages %}{% endif %}
{%- for message in turns %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must take turns') }}{% endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<turn>' + role + '\n' + (system + '\n\n' if loop.first and system else '') }}
{{- message['content'] | trim + '</turn>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}""",
    "instructions": """{{ bos_token }}{% set ns = namespace(first=true) %}
{%- for message in messages %}
{%- if message.role == 'system' %}{% continue %}{% endif %}
{%- if message.role == 'user' %}{{ '[INST] ' ~ message.content ~ ' [/INST]' }}
{%- else %}{% generation %}{{ ' ' ~ message.content ~ eos_token }}{% endgeneration %}{% endif %}
{%- set ns.first = false %}{% endfor %}""",
    "helpers": """{%- macro turn(message) -%}{{ message | tojson }}{%- endmacro -%}
{% if tools is none and documents is none and custom is not defined %}{{ strftime_now('%Y') }}{% endif %}
{%- for message in messages[::-1] %}{{ turn(message) }}{{ {'b': [1], 'a': '<é>'} | tojson(indent=2) }}{% endfor %}
{%- for i in range(3) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}{{ sep_token }}""",
}


def both(
    tmp_path: Path, kind: str, config: dict[str, Any] | None = None, files: dict[str, str] | None = None
) -> tuple[Tokenizer, PreTrainedTokenizerBase]:
    """The same tokenizer in our hands and in those of transformers."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **(config or {})}
    (tmp_path / "tokenizer.json").write_text(KINDS[kind].to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in (files or {}).items():
        (tmp_path / name).write_text(text)
    ours = Tokenizer.from_bundle(bundle_of(KINDS[kind], {"tokenizer_config.json": config, **(files or {})}))
    return ours, AutoTokenizer.from_pretrained(tmp_path)


CONFIGS = [
    {},
    {"add_bos_token": True},
    {"add_bos_token": False},
    {"add_bos_token": True, "add_eos_token": True},
    {"add_eos_token": True, "bos_token": None},
    {"bos_token": {"__type": "AddedToken", "content": "<begin>", "special": True}, "add_bos_token": True},
    {"pad_token": "<pad>"},
]


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_text_has_the_ids_that_transformers_gives(tmp_path: Path, kind: str, config: dict[str, Any]) -> None:
    ours, theirs = both(tmp_path, kind, config)
    for text in ("fox", " fox", "<s>fox", "<s> fox</s>", "", HARD_TEXT, "<tool>x<begin>y<pad>"):
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]


def test_limits_of_somebodys_training_run_do_not_cut_a_prompt(tmp_path: Path) -> None:
    library = type(KINDS["byte_level"]).from_str(KINDS["byte_level"].to_str())
    library.enable_truncation(4)
    library.enable_padding(length=64)
    ours = Tokenizer.from_bundle(bundle_of(library))
    assert ours.encode("the lazy dog sleeps on") == KINDS["byte_level"].encode("the lazy dog sleeps on").ids


def test_tokens_that_only_the_configuration_lists_are_known(tmp_path: Path) -> None:
    first = KINDS["byte_level"].get_vocab_size()
    added = {
        str(first): {"content": "<|new|>", "special": True, "normalized": False, "lstrip": False, "rstrip": False},
        str(first + 1): {"content": "new", "special": False, "normalized": False, "single_word": False},
    }
    ours, theirs = both(tmp_path, "byte_level", {"added_tokens_decoder": added})
    ids = ours.encode("a<|new|> new")
    assert ids == theirs("a<|new|> new")["input_ids"]
    assert {first, first + 1} <= set(ids)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "byte_fallback_strip"])
@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}], ids=["plain", "adds_bos"])
def test_a_chat_has_the_ids_that_transformers_gives(
    tmp_path: Path, kind: str, name: str, config: dict[str, Any]
) -> None:
    ours, theirs = both(tmp_path, kind, {"chat_template": TEMPLATES[name], **config})
    for turns in (TURNS, TURNS[1:], TURNS[:2], TURNS[1:2]):
        wanted = theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(turns) == wanted
        assert wanted.count(theirs.bos_token_id) == TEMPLATES[name].count("bos_token")


def test_a_longer_chat_begins_with_the_ids_of_the_shorter(tmp_path: Path) -> None:
    ours, _ = both(tmp_path, "byte_level", {"chat_template": TEMPLATES["tagged_lines"]})
    short = ours.encode_chat(TURNS[:2])
    assert ours.encode_chat(TURNS)[: len(short)] == short


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]}, {}),
        ({"chat_template": {"tool_use": "no", "default": "yes"}}, {}),
        ({"chat_template": "no"}, {"chat_template.jinja": "yes"}),
        ({}, {"chat_template.jinja": "yes"}),
    ],
)
def test_the_default_template_is_found_where_transformers_finds_it(
    tmp_path: Path, config: dict[str, Any], files: dict[str, str]
) -> None:
    ours, theirs = both(tmp_path, "byte_level", config, files)
    ids = ours.encode_chat(TURNS)
    assert ours.decode(ids) == "yes"
    assert ids == theirs.apply_chat_template(TURNS, return_dict=False)


def test_the_template_of_a_processor_is_the_last_resort() -> None:
    files = {"chat_template.json": {"chat_template": "yes"}}
    assert Tokenizer.from_bundle(bundle_of(KINDS["byte_level"], files)).has_chat_template
    none = {"tokenizer_config.json": {"chat_template": [{"name": "tool_use", "template": "no"}]}}
    assert not Tokenizer.from_bundle(bundle_of(KINDS["byte_level"], none)).has_chat_template


def test_special_tokens_may_be_named_in_a_map_of_their_own(tmp_path: Path) -> None:
    named = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    files = {"special_tokens_map.json": named, "chat_template.jinja": "{{ bos_token }}|{{ eos_token }}"}
    ours = Tokenizer.from_bundle(bundle_of(KINDS["byte_level"], files))
    assert ours.decode(ours.encode_chat(TURNS), skip_special_tokens=False) == "<s>|</s>"
