"""C8.1: the head is the stored one, or else the embeddings, and never random."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.model.conftest import MAX_ROWS, Model, random_ids
from tests.model.directories import edit_json, edit_weights, refusal
from tests.model.driver import Driver
from tests.model.test_margin import NUM_OUTPUTS, assert_margin, greedy
from tests.tiny_models import TINY_DECODER, save_model


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
