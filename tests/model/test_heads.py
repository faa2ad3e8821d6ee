"""Any number of query heads for a key head, any size of a head, caps on scores and logits."""

import pytest
import torch
import transformers

from tests.margin import reference_logits
from tests.model.conftest import MAX_ROWS, Model, random_ids
from tests.model.driver import Driver
from tests.model.families import SERVED, tiny_config
from tests.model.test_margin import assert_margin, drawn, greedy
from tests.tiny_models import TINY_DECODER, save_model

NUM_OUTPUTS = 4
BF16_MARGIN = 0.15  # nats; the model itself is this coarse, and modules that were replaced round elsewhere


def poisoned(model):
    """What is in no slot of a row must not matter."""
    for cache in model.loaded.runner._memory.tensors:
        cache.fill_(torch.nan)
    return model


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(3, 1), (9, 3), (5, 1), (10, 2), (28, 4), (12, 2), (32, 1), (24, 8), (8, 8)]
)
def test_query_heads_in_groups_of_any_size(heads, kv_heads, tmp_path):
    config = transformers.LlamaConfig(
        **TINY_DECODER | {"hidden_size": 8 * heads, "num_attention_heads": heads, "num_key_value_heads": kv_heads},
        head_dim=16,
    )
    model = poisoned(Model(save_model(tmp_path, config)))
    for begin in (1, 14, 27):  # three at a time, of 1 to 40 tokens
        sequences = [greedy(random_ids(length, length)) for length in range(begin, begin + 14, 6)]
        Driver(model.loaded, MAX_ROWS).generate(sequences, NUM_OUTPUTS, chunk=11)
        assert_margin(model, *sequences, num_outputs=NUM_OUTPUTS)


def head_config(head_dim: int):
    """Heads that do not add up to the hidden size; a rotation needs an even size, so the odd one has none."""
    if head_dim % 2:
        return transformers.GPT2Config(
            vocab_size=320, n_embd=4 * head_dim, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2
        )
    return transformers.LlamaConfig(**TINY_DECODER, head_dim=head_dim)


@pytest.mark.parametrize("head_dim", [1, 8, 80, 96, 112, 120, 160, 192, 256])
def test_heads_of_any_size(head_dim, tmp_path):
    model = poisoned(Model(save_model(tmp_path, head_config(head_dim))))
    sequences = [greedy(random_ids(1, 1)), greedy(random_ids(2, 17)), drawn(random_ids(3, 8), seed=3)]
    Driver(model.loaded, MAX_ROWS).generate(sequences, NUM_OUTPUTS, chunk=6)
    assert_margin(model, *sequences, num_outputs=NUM_OUTPUTS)


@pytest.mark.parametrize("head_dim", [1, 8, 80, 96, 112, 120, 160, 192, 256])
def test_heads_of_any_size_in_bf16(head_dim, tmp_path):
    model = poisoned(Model(save_model(tmp_path, head_config(head_dim)), torch.bfloat16))
    sequences = [greedy(random_ids(1, 1)), greedy(random_ids(2, 17))]
    Driver(model.loaded, MAX_ROWS).generate(sequences, NUM_OUTPUTS, chunk=6)
    assert_margin(model, *sequences, num_outputs=NUM_OUTPUTS, margin=BF16_MARGIN)


def test_caps_on_scores_and_on_logits_are_applied_and_matter(tmp_path):
    config = tiny_config("gemma2", SERVED["gemma2"])
    model = Model(save_model(tmp_path, config))
    sequences = [greedy(random_ids(1, 30))] + [drawn(random_ids(2, 12), seed=seed) for seed in range(3)]
    Driver(model.loaded, MAX_ROWS).generate(sequences, 8)
    assert_margin(model, *sequences, num_outputs=8)
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        uncapped = model.reference.from_pretrained(tmp_path, attn_implementation="eager", **{cap: None}).eval()
        pair = [torch.log_softmax(reference_logits(m, sequences[0].token_ids), -1) for m in (model.reference, uncapped)]
        assert (pair[0] - pair[1]).abs().max() > 0.1
