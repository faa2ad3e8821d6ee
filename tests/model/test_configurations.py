"""Weights that are not those of the configuration, or not those of a model that can be served, are refused."""

import pytest
import torch
import transformers

from executor_svc.model.load import load
from executor_svc.model.refusal import ModelRefused
from tests.model.checkpoints import make_fp8_blocks
from tests.model.conftest import settings_for
from tests.model.directories import edit_json, edit_weights, refusal
from tests.tiny_models import TINY_DECODER, save_model, save_tokenizer


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


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_type_that_weights_were_saved_in_is_found_under_its_old_name_too(directory, key):
    edit_json(directory / "config.json", **{"dtype": ..., key: "bfloat16"})
    edit_weights(directory, lambda weights: weights.update({k: w.bfloat16() for k, w in weights.items()}))
    assert load(settings_for(directory, dtype="auto")).facts.dtype == "bfloat16"


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
