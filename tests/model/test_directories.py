"""A model's directory that is not what it says it is, or not a model that can be served, is refused with the reason."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from executor_svc.model import loading
from executor_svc.model.load import load
from executor_svc.model.loading import find_directory
from executor_svc.model.refusal import ModelRefused
from scheduler_svc.text.tokenizer import Tokenizer
from tests.model.checkpoints import make_fp8_blocks
from tests.model.conftest import MAX_ROWS, Model, random_ids, settings_for
from tests.model.driver import Driver
from tests.model.test_margin import NUM_OUTPUTS, assert_margin, greedy
from tests.tiny_models import TINY_DECODER, save_model, save_tokenizer

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def directory(tiny_directories, tmp_path):
    """A copy of the tiny Llama that a test may change."""
    return shutil.copytree(tiny_directories["llama"], tmp_path / "llama")


def edit_json(file: Path, **changes) -> None:
    """A change to `...` takes the entry out."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))


def edit_weights(directory: Path, edit) -> None:
    weights = load_file(directory / "model.safetensors")
    edit(weights)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def split(directory: Path) -> None:
    weights = load_file(directory / "model.safetensors")
    names = sorted(weights)
    halves = {FIRST: names[: len(names) // 2], SECOND: names[len(names) // 2 :]}
    for file, half in halves.items():
        save_file({name: weights[name] for name in half}, directory / file, metadata={"format": "pt"})
    (directory / "model.safetensors").unlink()
    places = {name: file for file, half in halves.items() for name in half}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def refusal(directory: Path, **settings) -> str:
    with pytest.raises(ModelRefused) as refused:
        load(settings_for(directory, **settings))
    return str(refused.value)


SAFETENSORS = {"one file": lambda directory: None, "several files and their index": split}


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


def compressed(groups) -> dict:
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vocab_size": 400}, r"stores lm_head.weight as \[320, 64\] where its configuration wants \[400, 64\]"),
        ({"vocab_size": 300}, r"stores lm_head.weight as \[320, 64\] where its configuration wants \[300, 64\]"),
        ({"intermediate_size": 128}, "does not fit its configuration"),
        ({"num_hidden_layers": 3}, "lacks weights .* model.layers.2"),
        ({"num_hidden_layers": 1}, "holds more .* model.layers.1"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "those of LlamaForSequenceClassification"),
        ({"architectures": ["MistralForCausalLM"]}, "those of MistralForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, "architectures .* must be a list of names"),
        ({"architectures": 5}, "architectures .* must be a list of names"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures .* must be a list of names"),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights .* names weights of its own"),
        (compressed(["group_0"]), "config_groups .* not made of objects"),
        (compressed({"group_0": 4}), "config_groups .* not made of objects"),
        (compressed({"group_0": {"input_activations": "int8"}}), "config_groups .* not made of objects"),
        ({"model_type": "nothing"}, "config.json cannot be used: .*nothing"),
        ({"model_type": ...}, "config.json cannot be used: .*model_type"),
        ({"is_encoder_decoder": True}, "only decoders are served"),
        ({"num_attention_heads": 0}, "config.json cannot be used"),
        ({"hidden_size": "many"}, "config.json cannot be used: .*hidden_size"),
        ({"dtype": "float33"}, "config.json cannot be used: .*float33"),
        ({"dtype": "int8"}, "int8"),
        ({"dtype": "float64"}, "has weights of type torch.float64; set dtype"),
        ({"max_position_embeddings": 0}, "set max_model_len"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(directory, changes, reason):
    edit_json(directory / "config.json", **changes)
    with pytest.raises(ModelRefused, match=reason):
        load(settings_for(directory, dtype="auto"))


@pytest.mark.parametrize("changes", [{"architectures": ...}, {"architectures": ["HouseLlamaForCausalLM"]}])
def test_an_architecture_that_is_missing_or_unknown_is_that_of_the_model_type(directory, changes):
    edit_json(directory / "config.json", **changes)
    assert load(settings_for(directory)).facts.architecture == "LlamaForCausalLM"


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


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_type_that_weights_were_saved_in_is_found_under_its_old_name_too(directory, key):
    edit_json(directory / "config.json", **{"dtype": ..., key: "bfloat16"})
    edit_weights(directory, lambda weights: weights.update({k: w.bfloat16() for k, w in weights.items()}))
    assert load(settings_for(directory, dtype="auto")).facts.dtype == "bfloat16"


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


def test_weights_that_are_not_numbers_are_refused(directory):
    edit_weights(directory, lambda weights: weights["model.norm.weight"].fill_(float("nan")))
    assert "gives no finite logits" in refusal(directory)


def test_experts_in_a_type_that_nobody_explains_are_refused(tmp_path):
    config = transformers.GptOssConfig(**TINY_DECODER, num_local_experts=2, num_experts_per_tok=1, head_dim=16)
    save_model(tmp_path, config)
    name = "model.layers.0.mlp.experts.down_proj"
    for dtype in (torch.float8_e4m3fn, torch.int8):
        edit_weights(tmp_path, lambda weights, dtype=dtype: weights.update({name: weights[name].to(dtype)}))
        assert f"stores {name} as" in refusal(tmp_path)


def test_a_quantised_weight_without_its_scale_is_refused(tmp_path):
    make_fp8_blocks(tmp_path)
    lost = "model.layers.1.mlp.up_proj.weight_scale_inv"
    edit_weights(tmp_path, lambda weights: weights.pop(lost))
    assert f"without a scale ({lost})" in refusal(tmp_path)


def test_an_adapter_is_refused(directory):
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    assert "merge it into its base model" in refusal(directory)


def test_a_directory_with_nothing_but_a_gguf_file_is_refused_with_its_name(tmp_path):
    (tmp_path / "model.gguf").touch()
    assert f"name the file: {tmp_path}/model.gguf" in refusal(tmp_path)


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
OTHERS = {
    "encoder and decoder": lambda: transformers.BartConfig(vocab_size=320, d_model=32, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32),
    "no head": lambda: transformers.LlamaConfig(**TINY_DECODER),
    "an encoder": lambda: transformers.BertConfig(**SMALL, vocab_size=320),
    "no text": lambda: transformers.ViTConfig(**SMALL, image_size=32),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_a_model_that_does_not_generate_text_is_refused(tmp_path, kind):
    transformers.AutoModel.from_config(OTHERS[kind]()).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    reasons = {
        "encoder and decoder": "only decoders are served",
        "no head": "lacks weights .*: lm_head.weight|those of LlamaModel",
        "an encoder": "lacks weights|those of BertModel",
        "no text": "ViTConfig",
    }
    with pytest.raises(ModelRefused, match=reasons[kind]) as refused:
        load(settings_for(tmp_path))
    assert len(str(refused.value)) < 1000


def test_a_headless_model_with_tied_embeddings_is_refused_too(tmp_path):
    config = transformers.LlamaConfig(**TINY_DECODER, tie_word_embeddings=True)
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    assert "those of LlamaModel" in refusal(tmp_path)


REMOTE_CONFIG = """
from transformers import LlamaConfig

class HouseConfig(LlamaConfig):
    model_type = "house"
"""
REMOTE_MODEL = """
from transformers import LlamaForCausalLM
from .configuration_house import HouseConfig

class HouseForCausalLM(LlamaForCausalLM):
    config_class = HouseConfig

    def forward(self, *arguments, **options):
        output = super().forward(*arguments, **options)
        output.logits = -output.logits
        return output
"""


@pytest.fixture
def remote(directory, monkeypatch):
    """A model that brings its own code: the tiny Llama with all logits negated."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(directory.parent / "modules"))
    (directory / "configuration_house.py").write_text(REMOTE_CONFIG)
    (directory / "modeling_house.py").write_text(REMOTE_MODEL)
    places = {
        "AutoConfig": "configuration_house.HouseConfig",
        "AutoModelForCausalLM": "modeling_house.HouseForCausalLM",
    }
    edit_json(directory / "config.json", model_type="house", architectures=["HouseForCausalLM"], auto_map=places)
    return directory


def test_code_that_comes_with_a_model_is_not_run_unasked(remote):
    (remote / "configuration_house.py").write_text("raise SystemExit('was run')")
    assert "trust_remote_code" in refusal(remote)


def test_code_that_comes_with_a_model_is_run_when_asked(remote, tiny_directories):
    loaded = load(settings_for(remote, trust_remote_code=True))
    assert loaded.facts.architecture == "HouseForCausalLM"
    sequence = greedy(random_ids(1, 9))
    Driver(loaded, MAX_ROWS).generate([sequence], 1)
    plain = Model(tiny_directories["llama"]).reference(torch.tensor([sequence.token_ids[:9]])).logits[0, -1]
    assert sequence.outputs == [int(plain.argmin())]


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


# C8.1: tied embeddings


def tied(directory: Path, head: str) -> Path:
    """A tiny Llama with tied embeddings, and a stored head that is absent, equal or another."""
    save_model(directory, transformers.LlamaConfig(**TINY_DECODER, tie_word_embeddings=True))

    def edit(weights):
        embeddings = weights["model.embed_tokens.weight"]
        if head != "absent":
            weights["lm_head.weight"] = embeddings.flip(0) if head == "other" else embeddings.clone()

    edit_weights(directory, edit)
    return directory


@pytest.mark.parametrize("head", ["absent", "equal", "other"])
def test_the_head_is_the_stored_one_or_else_the_embeddings(tmp_path, head):
    """A stored head that differs goes before what the configuration says of it, as in transformers."""
    model, sequence = Model(tied(tmp_path, head)), greedy(random_ids(1, 9))
    weights = load_file(tmp_path / "model.safetensors")
    expected = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    assert torch.equal(model.loaded.runner.forward.model.lm_head.weight, expected)
    Driver(model.loaded, MAX_ROWS).generate([sequence], NUM_OUTPUTS)
    assert_margin(model, sequence)


def test_an_untied_head_that_is_missing_is_refused(directory):
    edit_weights(directory, lambda weights: weights.pop("lm_head.weight"))
    assert "lm_head.weight" in refusal(directory)


def test_a_flag_for_tied_embeddings_inside_of_a_nested_configuration_is_found(tmp_path):
    """Gemma 3 with vision, served for its text alone."""
    text = TINY_DECODER | {"num_key_value_heads": 1}
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(
            **text, head_dim=24, query_pre_attn_scalar=24, sliding_window=8, tie_word_embeddings=True,
            layer_types=["sliding_attention", "full_attention"],
        ).to_dict(),
        vision_config={"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
                       "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4, image_token_index=258, boi_token_index=259, eoi_token_index=260,
    )  # fmt: skip
    save_model(tmp_path, config)
    edit_json(tmp_path / "config.json", tie_word_embeddings=...)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model, sequence = Model(tmp_path), greedy(random_ids(1, 20))
    Driver(model.loaded, MAX_ROWS).generate([sequence], NUM_OUTPUTS)
    assert_margin(model, sequence)
