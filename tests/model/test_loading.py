"""What is loaded is what was saved, with facts from all the places where models keep them; or it is refused."""

import hashlib
import io
import json
import zipfile
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from executor_svc.model import control_groups, free_memory, loading, memory
from executor_svc.model.facts import fingerprint, model_len, rope_switch_len
from executor_svc.model.load import load
from executor_svc.model.memory import choose_num_blocks
from executor_svc.model.refusal import ModelRefused
from tests.margin import assert_greedy, reference_logits
from tests.model.conftest import MAX_ROWS, Model, random_ids, settings_for
from tests.model.driver import Driver, Sequence, row_sampling
from tests.model.test_margin import NUM_OUTPUTS, assert_margin, greedy
from tests.tiny_models import TINY_DECODER, VOCAB_SIZE


def edit_json(file, **changes):
    content = json.loads(file.read_text()) if file.exists() else {}
    content.update(changes)
    file.write_text(json.dumps({name: value for name, value in content.items() if value != "missing"}))


@pytest.mark.parametrize(("block_size", "dtype", "warned"), [(4, "float32", 1), (16, "float16", 1), (16, "float32", 0)])
def test_what_native_attention_does_not_serve_is_said(directory, block_size, dtype, warned):
    with capture_logs() as logs:
        load(settings_for(directory, block_size=block_size, dtype=dtype))
    reasons = [entry["reason"] for entry in logs if entry["event"] == "native_attention_not_used"]
    assert len(reasons) == warned
    assert all(f"blocks of {block_size} slots" in reason for reason in reasons)


def test_facts_name_the_model_and_its_limits(directory):
    loaded = load(settings_for(directory, served_name="small"))
    facts = loaded.facts
    assert (facts.name, facts.architecture, facts.dtype) == ("small", "LlamaForCausalLM", "float32")
    assert (facts.vocab_size, facts.max_model_len, facts.block_size) == (VOCAB_SIZE, 256, 4)
    assert (facts.bos_token_id, list(facts.eos_token_ids)) == (256, [257])
    assert loaded.num_blocks == 600
    assert loaded.warm_up_ms >= 1


def test_pickled_weights_are_refused(directory):
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match="runs code when it is read"):
        load(settings_for(directory))


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_directory_without_an_essential_file_is_refused(directory, lost):
    (directory / lost).unlink()
    with pytest.raises(ModelRefused):
        load(settings_for(directory))


@pytest.mark.parametrize("model", ["/nowhere/model", "./nowhere", "/nowhere/model.gguf"])
def test_a_path_that_leads_nowhere_is_refused(model):
    with pytest.raises(ModelRefused, match="does not exist"):
        load(settings_for(model))


def test_a_package_of_the_name_of_our_kernels_is_refused(monkeypatch):
    monkeypatch.setattr(loading.metadata, "version", lambda name: {"kernels": "0.9"}[name])
    with pytest.raises(ModelRefused, match="pip uninstall kernels"):
        loading.refuse_foreign_kernels()


def test_two_models_in_one_process_do_not_disturb_each_other(tiny_directories):
    models = [Model(tiny_directories[family]) for family in ("llama", "mistral", "llama")]
    sequences = [greedy(random_ids(i, 7 + i)) for i in range(3)]
    drivers = [Driver(model.loaded, MAX_ROWS) for model in models]
    for driver, sequence in zip(drivers, sequences, strict=True):
        driver.start(sequence)
    for _ in range(NUM_OUTPUTS):
        for driver in drivers:
            driver.step()
    for model, sequence in zip(models, sequences, strict=True):
        assert_margin(model, sequence)


def test_a_step_without_samples_does_not_run_the_head(llama):
    driver, calls = Driver(llama.loaded, MAX_ROWS), []
    hook = llama.loaded.runner.forward.model.lm_head.register_forward_hook(lambda *call: calls.append(call[2].shape[1]))
    row = driver.start(Sequence(random_ids(1, 9), 9, row_sampling()))
    others = [driver.start(Sequence(random_ids(i, 3), 3, row_sampling())) for i in range(2)]
    assert driver.step(chunk=4, rows=[row]) == {}
    assert calls == []
    assert len(driver.step(chunk=4)) == 2
    hook.remove()
    assert calls == [2]
    assert len(others) == 2


def test_what_other_sequences_left_in_kv_memory_changes_nothing(llama):
    prompts = [random_ids(i, 3 + 2 * i) for i in range(5)]
    outputs = []
    for poison in (0.0, float("nan"), float("inf")):
        for cache in llama.loaded.runner._memory.tensors:
            cache.fill_(poison)
        sequences = [greedy(prompt) for prompt in prompts]
        Driver(llama.loaded, MAX_ROWS).generate(sequences, NUM_OUTPUTS, chunk=5)
        outputs.append([(sequence.outputs, sequence.logprobs) for sequence in sequences])
    assert outputs[0] == outputs[1] == outputs[2]


def test_a_row_that_is_not_finite_ends_alone(directory):
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][5] = float("nan")
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    loaded = load(settings_for(directory))
    good = [greedy([1, 2, 3]), greedy([9, 8, 7, 6, 4])]
    alone = [greedy([1, 2, 3]), greedy([9, 8, 7, 6, 4])]
    driver = Driver(loaded, MAX_ROWS)
    rows = [driver.start(good[0]), driver.start(greedy([1, 5, 3])), driver.start(good[1])]
    assert driver.step()[rows[1]] == -1
    driver.end(rows[1])
    driver.run([rows[0], rows[2]], 4)
    for sequence in alone:
        Driver(loaded, MAX_ROWS).generate([sequence], 4)
    assert [sequence.outputs for sequence in good] == [sequence.outputs for sequence in alone]


def test_the_bundle_is_the_same_each_time_and_holds_what_a_scheduler_needs(directory):
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    first, second = (load(settings_for(directory)).bundle for _ in range(2))
    assert hashlib.sha256(first).digest() == hashlib.sha256(second).digest()
    with zipfile.ZipFile(io.BytesIO(first)) as archive:
        names = archive.namelist()
        assert names == sorted(names)
        assert {"tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"} <= set(names)
        assert json.loads(archive.read("tokenizer.json")) == json.loads((directory / "tokenizer.json").read_text())
        assert not any(name.endswith(".safetensors") for name in names)


def test_the_fingerprint_follows_weights_configuration_and_type(directory):
    before = fingerprint(directory, "float32")
    assert fingerprint(directory, "float32") == before
    assert fingerprint(directory, "bfloat16") != before
    edit_json(directory / "config.json", rms_norm_eps=1e-3)
    changed = fingerprint(directory, "float32")
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    assert len({before, changed, fingerprint(directory, "float32")}) == 3


ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("rope", "wanted", "expected"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, None, 256),
        ({"rope_type": "default", "rope_theta": 1e4}, 100, 100),
        ({"rope_type": "default", "rope_theta": 1e4}, 1000, 256),
        (ROPE | {"rope_type": "yarn"}, None, 256),
        (ROPE | {"rope_type": "dynamic"}, None, 32),
        (ROPE | {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}, 100, 100),
    ],
)
def test_the_longest_sequence_is_what_model_and_cached_keys_allow(rope, wanted, expected):
    config = transformers.LlamaConfig(**TINY_DECODER, rope_parameters=rope)
    assert model_len(config, wanted) == expected


@pytest.mark.parametrize(
    ("rope_type", "max_model_len", "expected"), [("longrope", 33, 32), ("longrope", 32, 0), ("yarn", 256, 0)]
)
def test_the_length_past_which_keys_are_turned_otherwise_is_named_where_a_sequence_can_get_there(
    rope_type, max_model_len, expected
):
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if rope_type == "longrope" else {}
    config = transformers.LlamaConfig(**TINY_DECODER, rope_parameters=ROPE | {"rope_type": rope_type} | factors)
    assert rope_switch_len(config, max_model_len) == expected


@pytest.mark.parametrize("prompt", [1, 2, 127])
def test_learned_positions_are_right_to_the_end_of_their_table(tiny_directories, prompt):
    model = Model(tiny_directories["gpt2"])
    assert model.loaded.facts.max_model_len == 128
    sequence = greedy(random_ids(prompt, prompt))
    Driver(model.loaded, MAX_ROWS).generate([sequence], 128 - prompt, chunk=50)
    logits = reference_logits(model.reference, sequence.token_ids)
    assert_greedy(logits, sequence.token_ids, prompt)


def test_kv_memory_is_sized_by_count_by_bytes_or_by_what_is_free(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 10_000)
    cpu = torch.device("cpu")
    assert choose_num_blocks(100, 2_000, cpu, num_blocks=50, kv_bytes=None, most_blocks=10) == 50
    assert choose_num_blocks(100, 2_000, cpu, num_blocks=None, kv_bytes=1_234, most_blocks=10) == 12
    assert choose_num_blocks(100, 2_000, cpu, num_blocks=None, kv_bytes=None, most_blocks=99) == 40
    assert choose_num_blocks(100, 2_000, cpu, num_blocks=None, kv_bytes=None, most_blocks=10) == 10


@pytest.mark.parametrize(("num_blocks", "kv_bytes"), [(81, None), (None, 8_100), (None, 150)])
def test_kv_memory_that_does_not_fit_is_refused_with_both_sizes(monkeypatch, num_blocks, kv_bytes):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 10_000)
    with pytest.raises(ModelRefused, match=r"\d+ bytes are required .* 10000 bytes are available"):
        choose_num_blocks(100, 2_000, torch.device("cpu"), num_blocks=num_blocks, kv_bytes=kv_bytes, most_blocks=99)


VERSION_2 = ("memory.max", "memory.current", "inactive_file")
VERSION_1 = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file")


@pytest.mark.parametrize(("limit", "usage", "reclaimable"), [VERSION_2, VERSION_1])
@pytest.mark.parametrize("group", [".", "services/paged"])
def test_what_a_control_group_has_left_is_all_that_is_available(
    monkeypatch, tmp_path, limit, usage, reclaimable, group
):
    """C10.5: of both versions, the root's or the process's own; pages of files that are not in use can be had."""
    (tmp_path / "own").write_text("4:memory:/services/paged\n0::/services/paged\n")
    monkeypatch.setattr(control_groups, "_ROOT", tmp_path)
    monkeypatch.setattr(control_groups, "_OWN", tmp_path / "own")
    cpu = torch.device("cpu")
    machine = free_memory._machine()
    assert free_memory.available_bytes(cpu) > 100_000_000, "no group"
    place = (tmp_path / limit).parent / group
    place.mkdir(parents=True, exist_ok=True)
    limit_file, usage_file = (place / Path(name).name for name in (limit, usage))
    limit_file.write_text("30000000\n")
    usage_file.write_text("25000000\n")
    (place / "memory.stat").write_text(f"anon 24000000\n{reclaimable} 2000000\nmapped 7\n")
    assert free_memory.available_bytes(cpu) == 7_000_000
    with pytest.raises(ModelRefused, match="7000000 bytes are available"):
        choose_num_blocks(100, 2_000, cpu, num_blocks=70_000, kv_bytes=None, most_blocks=10)
    usage_file.write_text("90000000\n")
    assert free_memory.available_bytes(cpu) == 0, "more than there may be"
    limit_file.write_text("max\n" if limit == "memory.max" else f"{1 << 62}\n")
    assert free_memory.available_bytes(cpu) > machine // 2, "a group without a limit"


def test_a_sequence_is_never_longer_than_all_blocks_together(directory):
    assert load(settings_for(directory, num_blocks=11)).facts.max_model_len == 40


def test_keys_and_values_in_8_bits_take_half_of_the_memory(directory):
    kv_memory = {"num_blocks": None, "kv_memory": 1 << 20, "block_size": 16}
    exact, int8 = (load(settings_for(directory, int8_kv=on, dtype="bfloat16", **kv_memory)) for on in (False, True))
    assert int8.num_blocks > 1.5 * exact.num_blocks  # heads of 16 numbers, and a scale of 4 bytes
    assert int8.facts.fingerprint != exact.facts.fingerprint


@pytest.mark.parametrize("fused_modules", [True, False])
def test_with_keys_and_values_in_8_bits_texts_are_nearly_as_likely(directory, fused_modules):
    model = Model(directory, int8_kv=True, block_size=16, num_blocks=100, fused_modules=fused_modules)
    sequences = [greedy(random_ids(seed, 20 + seed)) for seed in range(3)]
    Driver(model.loaded, MAX_ROWS).generate(sequences, NUM_OUTPUTS)
    for sequence in sequences:
        logits = reference_logits(model.reference, sequence.token_ids)
        assert_greedy(logits, sequence.token_ids, sequence.num_prompt, margin=0.05)


def test_keys_and_values_in_8_bits_are_refused_where_they_would_not_be(directory):
    for changes in ({"cpu_kernels": "reference", "block_size": 16}, {"block_size": 8}):
        with pytest.raises(ModelRefused, match=r"int8_kv is set, .* 8 bits"):
            load(settings_for(directory, int8_kv=True, **changes))


def test_weights_in_8_bits_are_refused_where_they_would_not_be(directory):
    for changes in ({"fused_modules": False, "dtype": "bfloat16"}, {"cpu_kernels": "reference"}, {"dtype": "float32"}):
        with pytest.raises(ModelRefused, match="int8_weights is set, which takes"):
            load(settings_for(directory, int8_weights=True, **changes))
