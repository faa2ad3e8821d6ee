"""A tokenizer that is kept on disk is the one that would be made."""

import json

import pytest

from executor_svc.model import ready_tokenizer
from executor_svc.model.ready_tokenizer import MAX_KEPT, load_ready, make_ready
from tests.tiny_models import save_tokenizer


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(ready_tokenizer, "_WORTH_KEEPING_BYTES", 0)
    directory = tmp_path / "model"
    directory.mkdir()
    save_tokenizer(directory)
    return directory


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def made(monkeypatch):
    """Of which directories a tokenizer was built."""
    built = []

    def build(directory, **options):
        built.append(directory)
        return make_ready(directory, **options)

    monkeypatch.setattr(ready_tokenizer, "make_ready", build)
    return built


def files(cache):
    return sorted((cache / "ready-tokenizers").iterdir())


def test_a_second_load_finds_what_the_first_has_made(directory, cache, made):
    first = load_ready(directory, cache, trust_remote_code=False)
    assert load_ready(directory, cache, trust_remote_code=False) == first
    assert first == make_ready(directory, trust_remote_code=False)
    assert made == [directory]


def test_any_file_that_changes_is_noticed_and_weights_are_not_read(directory, cache, made):
    load_ready(directory, cache, trust_remote_code=False)
    (directory / "model.safetensors").write_bytes(b"weights")
    load_ready(directory, cache, trust_remote_code=False)
    assert len(made) == 1
    for number, name in enumerate(("config.json", "additional_chat_templates/tool.jinja")):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(json.dumps({"vocab_size": number}))
        load_ready(directory, cache, trust_remote_code=False)
        assert len(made) == 2 + number


def test_what_is_hidden_is_not_read(directory, cache, made):
    """As a clone has all weights once more in .git."""
    load_ready(directory, cache, trust_remote_code=False)
    hidden = directory / ".git" / "lfs"
    hidden.mkdir(parents=True)
    (hidden / "a0b1").write_bytes(b"weights")
    load_ready(directory, cache, trust_remote_code=False)
    assert len(made) == 1


def test_other_versions_of_what_makes_it_make_it_anew(directory, cache, made, monkeypatch):
    load_ready(directory, cache, trust_remote_code=False)
    monkeypatch.setattr(ready_tokenizer.metadata, "version", lambda package: "0.0")
    load_ready(directory, cache, trust_remote_code=False)
    assert len(made) == 2


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: b"[1]\n" + data])
def test_a_damaged_file_is_made_anew(directory, cache, made, damage):
    first = load_ready(directory, cache, trust_remote_code=False)
    (file,) = files(cache)
    file.write_bytes(damage(file.read_bytes()))
    assert load_ready(directory, cache, trust_remote_code=False) == first
    assert len(made) == 2
    assert load_ready(directory, cache, trust_remote_code=False) == first
    assert len(made) == 2


def test_what_runs_code_of_its_own_is_not_kept(directory, cache):
    load_ready(directory, cache, trust_remote_code=True)
    assert not cache.exists()


def test_a_directory_that_cannot_be_written_is_no_failure(directory, cache, made):
    cache.write_text("a file")
    load_ready(directory, cache, trust_remote_code=False)
    assert load_ready(directory, cache, trust_remote_code=False).facts.num_ids == 320
    assert len(made) == 2


def test_few_are_kept(directory, cache):
    for number in range(MAX_KEPT + 3):
        (directory / "config.json").write_text(json.dumps({"vocab_size": number}))
        load_ready(directory, cache, trust_remote_code=False)
    assert len(files(cache)) == MAX_KEPT
