"""A model that was proved once is served as it was proved, as long as nothing has changed that the proof hangs on."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from executor_svc.model import kept_proof, load, proof_key, understanding
from kernels import native_backend
from tests.model.conftest import MAX_ROWS, random_ids, settings_for
from tests.model.driver import Driver
from tests.model.fused_models import LEVEL
from tests.model.test_margin import NUM_OUTPUTS, assert_margin, greedy


@pytest.fixture
def cache(tmp_path):
    native_backend(LEVEL)  # loaded from the user's cache, whatever the settings say
    return tmp_path / "cache"


@pytest.fixture
def proved(monkeypatch):
    """One entry for each time that a model was proved."""
    times, prove = [], understanding.prove

    def noted(model, *rest):
        times.append(type(model).__name__)
        return prove(model, *rest)

    monkeypatch.setattr(understanding, "prove", noted)
    return times


def loaded(directory, cache, **changes):
    return load.load(settings_for(directory, cache_dir=cache, kept_proofs=True, **changes))


def files(cache):
    return sorted((cache / "proofs").iterdir())


def assert_serves(loaded_model, reference):
    """Greedy tokens of `loaded_model` are those of transformers' one, but for rounding."""
    sequence = greedy(random_ids(3, 9))
    Driver(loaded_model, MAX_ROWS).generate([sequence], NUM_OUTPUTS)
    assert_margin(reference, sequence)


def reasons(logs):
    return [event["reason"] for event in logs if event["event"] == "kept_proof_not_used"]


def test_a_second_load_proves_nothing_and_serves_the_same(directory, cache, proved, llama):
    first = loaded(directory, cache)
    second = loaded(directory, cache)
    assert len(proved) == 1
    assert second.facts == first.facts
    assert_serves(second, llama)
    assert len(files(cache)) == 1


def test_without_the_setting_nothing_is_kept_or_looked_for(directory, cache, proved):
    loaded(directory, cache)
    load.load(settings_for(directory, cache_dir=cache, kept_proofs=False))
    assert len(proved) == 2
    files(cache)[0].unlink()
    load.load(settings_for(directory, cache_dir=cache, kept_proofs=False))
    assert not files(cache)


@pytest.mark.parametrize(
    "changes", [{"trust_remote_code": True}, {"cpu_kernels": "reference"}, {"fused_modules": False}]
)
def test_what_no_key_says_enough_of_is_proved_each_time(directory, cache, proved, changes):
    loaded(directory, cache, **changes)
    loaded(directory, cache, **changes)
    assert len(proved) == 2
    assert not (cache / "proofs").exists()


def touch_weights(directory, monkeypatch):
    path = directory / "model.safetensors"
    os.utime(path, ns=(0, 0))


def rewrite_weights(directory, monkeypatch):
    """With the time that they had: the system's own time of change tells."""
    path = directory / "model.safetensors"
    status = path.stat()
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def change_config(directory, monkeypatch):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 2e-5}))


def other_version(directory, monkeypatch):
    version = proof_key.metadata.version
    monkeypatch.setattr(proof_key.metadata, "version", lambda name: "0.0" if name == "safetensors" else version(name))


def other_machine(directory, monkeypatch):
    monkeypatch.setattr(proof_key.platform, "machine", lambda: "vax")


def other_code(directory, monkeypatch):
    monkeypatch.setattr(proof_key, "_OWN", directory)


def other_environment(directory, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")


def other_threads(directory, monkeypatch):
    monkeypatch.setattr(proof_key.torch, "get_num_threads", lambda: 77)


CHANGES = [
    touch_weights,
    rewrite_weights,
    change_config,
    other_version,
    other_machine,
    other_code,
    other_environment,
    other_threads,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_whatever_a_proof_hangs_on_is_proved_anew_when_it_changes(directory, cache, proved, monkeypatch, change):
    loaded(directory, cache)
    change(directory, monkeypatch)
    loaded(directory, cache)
    assert len(proved) == 2
    assert len(files(cache)) == 2


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"max_model_len": 64}])
def test_settings_that_it_hangs_on_too(directory, cache, proved, changes):
    loaded(directory, cache)
    loaded(directory, cache, **changes)
    assert len(proved) == 2


def no_end(path):
    path.write_bytes(path.read_bytes()[:-1])


def nothing(path):
    path.write_bytes(b"")


def anybodys(path):
    path.chmod(0o666)


def a_link(path):
    other = path.with_suffix(".other")
    path.rename(other)
    path.symlink_to(other)


def of_another_key(path):
    stated = json.loads(path.read_bytes().partition(b"\n")[2])
    write_sealed(path, stated | {"key": "0" * 64})


def of_other_fields(path):
    stated = json.loads(path.read_bytes().partition(b"\n")[2])
    write_sealed(path, stated | {"cake": 1})


def write_sealed(path, stated):
    body = json.dumps(stated).encode()
    path.write_bytes(kept_proof.sealed(body))


@pytest.mark.parametrize(
    "damage", [no_end, nothing, anybodys, a_link, of_another_key, of_other_fields], ids=lambda damage: damage.__name__
)
def test_a_file_that_cannot_be_trusted_is_made_anew(directory, cache, proved, damage):
    loaded(directory, cache)
    (path,) = files(cache)
    damage(path)
    with capture_logs() as logs:
        loaded(directory, cache)
    assert len(proved) == 2
    assert len(reasons(logs)) == 1
    loaded(directory, cache)
    assert len(proved) == 2


def test_a_file_of_somebody_else_is_not_read(directory, cache, proved, monkeypatch):
    loaded(directory, cache)
    own = os.geteuid()
    monkeypatch.setattr(kept_proof.os, "geteuid", lambda: own + 1)
    loaded(directory, cache)
    assert len(proved) == 2


def test_other_weights_behind_the_same_key_are_noticed_and_proved(directory, cache, proved, monkeypatch, llama):
    """No key says all. What is served has to compute what was proved."""
    monkeypatch.setattr(load, "proof_key", lambda *_: "key")
    original = (directory / "model.safetensors").read_bytes()
    change_one_weight(directory)
    loaded(directory, cache)
    (directory / "model.safetensors").write_bytes(original)
    with capture_logs() as logs:
        second = loaded(directory, cache)
    assert ["small steps" in reason for reason in reasons(logs)] == [True]
    assert len(proved) == 2
    assert_serves(second, llama)
    loaded(directory, cache)
    assert len(proved) == 2


def change_one_weight(directory):
    path = directory / "model.safetensors"
    weights = load_file(path)
    name = next(name for name in weights if name.endswith("down_proj.weight"))
    weights[name] = weights[name] + 0.1 * torch.ones_like(weights[name])
    save_file(weights, path, metadata={"format": "pt"})


def test_a_recipe_that_does_not_fit_is_dropped_and_the_model_loaded_again(directory, cache, proved):
    loaded(directory, cache)
    (path,) = files(cache)
    stated = json.loads(path.read_bytes().partition(b"\n")[2])
    stated["recipe"]["replaced"][-1]["module"] = "model.cake"
    write_sealed(path, stated)
    with capture_logs() as logs:
        loaded(directory, cache)
    assert len(reasons(logs)) == 1
    assert len(proved) == 2


def test_where_nothing_can_be_kept_the_model_is_served(directory, tmp_path, proved):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "proofs").write_text("no directory")
    with capture_logs() as logs:
        loaded(directory, cache)
    assert "proof_not_kept" in [event["event"] for event in logs]


def test_the_ones_unused_for_longest_go(directory, cache, monkeypatch):
    monkeypatch.setattr(kept_proof, "MAX_KEPT", 2)
    kept = []
    for length in (32, 48, 64):
        loaded(directory, cache, max_model_len=length)
        kept.append(max(files(cache), key=lambda path: path.stat().st_mtime))
        os.utime(kept[-1], (length, length))
    assert files(cache) == sorted(kept[1:])
