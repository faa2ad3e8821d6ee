"""A directory that does not hold one whole model, or is not to be had, is refused with the reason."""

import json
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from executor_svc.model import loading
from executor_svc.model.load import load
from executor_svc.model.loading import find_directory
from executor_svc.model.refusal import ModelRefused
from scheduler_svc.text.tokenizer import Tokenizer
from tests.model.conftest import MAX_ROWS, Model, random_ids, settings_for
from tests.model.directories import INDEX, SAFETENSORS, SECOND, edit_json, refusal, split
from tests.model.driver import Driver
from tests.model.test_margin import NUM_OUTPUTS, assert_margin, greedy


@pytest.mark.parametrize("layout", SAFETENSORS)
def test_a_model_in_one_file_or_in_several_is_served(directory, layout):
    SAFETENSORS[layout](directory)
    model, sequence = Model(directory), greedy(random_ids(1, 9))
    Driver(model.loaded, MAX_ROWS).generate([sequence], NUM_OUTPUTS)
    assert_margin(model, sequence)


def cut(file: Path, num_bytes: int) -> None:
    file.write_bytes(file.read_bytes()[:num_bytes])


def name_in_index(directory: Path, file: str) -> None:
    index = json.loads((directory / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = file
    (directory / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda d: (d / SECOND).unlink(), f"lacks {SECOND}, which {INDEX} names"),
        (lambda d: cut(d / SECOND, -1000), f"{SECOND} has .* bytes where its header names"),
        (lambda d: cut(d / SECOND, 300), f"{SECOND} is cut short"),
        (lambda d: cut(d / SECOND, 0), f"{SECOND} is cut short"),
        (lambda d: (d / SECOND).write_bytes(b"\x02" + bytes(7) + b"[]"), f"{SECOND} is cut short"),
        (lambda d: (d / SECOND).write_bytes((1 << 17).to_bytes(8, "little") + b"[" * (1 << 17)), "is cut short"),
        (lambda d: ((d / SECOND).unlink(), (d / SECOND).mkdir()), f"{SECOND} cannot be read"),
        (lambda d: name_in_index(d, "../elsewhere.safetensors"), "no .safetensors file of that directory"),
        (lambda d: name_in_index(d, "/etc/model.safetensors"), "no .safetensors file of that directory"),
        (lambda d: name_in_index(d, "pytorch_model.bin"), "no .safetensors file of that directory"),
        (lambda d: (d / INDEX).write_text("{}"), "has no weight_map"),
        (lambda d: (d / INDEX).write_text('{"weight_map": ["a"]}'), "has no weight_map"),
        (lambda d: (d / INDEX).write_text("{"), "cannot be read as JSON"),
        (lambda d: (d / INDEX).unlink(), "neither model.safetensors nor"),
    ],
)
def test_files_that_do_not_make_one_whole_model_are_refused(directory, damage, reason):
    split(directory)
    damage(directory)
    with pytest.raises(ModelRefused, match=reason):
        load(settings_for(directory))


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.json",
    ],
)
@pytest.mark.parametrize("content", ["{", "[]", "", "[" * 100_000], ids=["open", "list", "empty", "deep"])
def test_settings_that_cannot_be_read_are_refused_by_name(directory, name, content):
    (directory / name).write_text(content)
    assert name in refusal(directory)


def test_a_model_without_generation_config_is_served(directory):
    (directory / "generation_config.json").unlink(missing_ok=True)
    assert list(load(settings_for(directory)).facts.eos_token_ids) == [257]


@pytest.mark.parametrize("place", [".", "../llama", "here"])
def test_a_model_is_named_after_its_directory_however_that_is_written(directory, monkeypatch, place):
    monkeypatch.chdir(directory)
    model = directory if place == "here" else place
    assert load(settings_for(model)).facts.name == "llama"


@pytest.mark.parametrize("template", [5, True, ["no name"]])
def test_a_chat_template_that_is_no_text_is_refused_before_a_scheduler_gets_it(directory, template):
    edit_json(directory / "tokenizer_config.json", chat_template=template)
    assert "tokenizer" in refusal(directory)


def test_a_tokenizer_that_a_scheduler_could_not_read_is_refused(directory):
    content = json.loads((directory / "tokenizer.json").read_text())
    content["model"]["vocab"]["far"] = 2**32 - 1
    (directory / "tokenizer.json").write_text(json.dumps(content))
    assert "the tokenizer cannot be read back" in refusal(directory)


def test_the_template_of_a_processor_reaches_the_scheduler(directory):
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    tokenizer = Tokenizer.from_bundle(load(settings_for(directory)).bundle)
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}]) == tokenizer.encode("hi")


def test_an_adapter_is_refused(directory):
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    assert "merge it into its base model" in refusal(directory)


def test_a_directory_with_nothing_but_a_gguf_file_is_refused_with_its_name(tmp_path):
    (tmp_path / "model.gguf").touch()
    assert f"name the file: {tmp_path}/model.gguf" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("nobody/nothing", "is no directory here, and the hub does not give it"),
        ("not a name!", "is no directory here, and the hub does not give it"),
        ("a" * 300, "is not to be found: .*too long"),
        ("~nobody-here/model", "is not to be found: .*home"),
    ],
)
def test_a_hub_id_that_cannot_be_had_is_refused(monkeypatch, tmp_path, model, reason):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelRefused, match=reason):
        find_directory(model, tmp_path, trust_remote_code=False)


def test_weights_that_a_hub_has_twice_are_downloaded_once():
    names = [
        "model-00001-of-00002.safetensors",
        "consolidated.safetensors",
        "original/model.safetensors",
        "config.json",
    ]
    chosen = filter_repo_objects(names, allow_patterns=loading._HUB_FILES, ignore_patterns=loading._HUB_COPIES)
    assert list(chosen) == [names[0], names[3]]


def test_a_tokenizer_that_cannot_be_served_is_refused_before_the_weights_are_read(directory, monkeypatch):
    monkeypatch.setattr(loading, "load_model", lambda *arguments, **options: pytest.fail("weights were read"))
    edit_json(directory / "tokenizer_config.json", chat_template=5)
    assert "not a text" in refusal(directory)
