"""Other attention than plain: sinks, soft-caps, latent heads, experts, odd ratios; and what must be refused."""

import pytest
import torch
import transformers

from executor_svc.model.proof import prove
from executor_svc.model.refusal import ModelRefused
from tests.model.conftest import BLOCK_SIZE, MAX_ROWS, Model, random_ids
from tests.model.driver import Driver
from tests.model.test_margin import NUM_OUTPUTS, assert_margin, drawn, greedy
from tests.tiny_models import TINY_DECODER, VOCAB_SIZE, WINDOW, save_model

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "gemma2": lambda: transformers.Gemma2Config(
        **TINY_DECODER, head_dim=16, query_pre_attn_scalar=16, sliding_window=WINDOW,
        attn_logit_softcapping=5.0, final_logit_softcapping=3.0,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **TINY_DECODER, **EXPERTS, head_dim=16, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **TINY_DECODER | {"num_key_value_heads": 4}, n_routed_experts=4, n_group=2, topk_group=1,
        num_experts_per_tok=2, moe_intermediate_size=32, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16,
    ),
    "mixtral": lambda: transformers.MixtralConfig(**TINY_DECODER, **EXPERTS),
    "odd_ratio": lambda: transformers.LlamaConfig(
        **TINY_DECODER | {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3}, head_dim=20
    ),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=64, init_std=0.2, bos_token_id=256, eos_token_id=257,
        pad_token_id=257,
    ),
    "granite": lambda: transformers.GraniteConfig(**TINY_DECODER, attention_multiplier=0.3, logits_scaling=4.0),
    "cohere": lambda: transformers.CohereConfig(**TINY_DECODER),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch_of_another_family(family, tmp_path):
    model = Model(save_model(tmp_path, FAMILIES[family]()))
    sequences = [greedy(random_ids(length, length)) for length in (1, 5, WINDOW, 30)]
    sequences += [drawn(random_ids(length, length), seed=length) for length in (6, 17)]
    Driver(model.loaded, MAX_ROWS).generate(sequences, NUM_OUTPUTS, chunk=BLOCK_SIZE + 1)
    assert_margin(model, *sequences)


def random_model(config):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def refusal(config) -> str:
    with pytest.raises(ModelRefused) as error:
        prove(random_model(config), 256)
    return str(error.value)


def test_a_model_that_never_calls_the_hook_is_refused():
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2)
    assert "2 layers, but the attention function was called 0 times" in refusal(config)


def test_a_model_with_a_recurrent_state_is_refused():
    assert "state beside keys and values" in refusal(transformers.FalconH1Config(**TINY_DECODER))


def test_tokens_that_meet_outside_of_attention_are_found_whatever_the_model_says_of_itself(monkeypatch):
    monkeypatch.setattr(transformers.FalconH1ForCausalLM, "_is_stateful", False)
    assert "mixes tokens outside of attention" in refusal(transformers.FalconH1Config(**TINY_DECODER))


def test_a_mask_that_no_window_describes_is_refused():
    config = transformers.Llama4TextConfig(
        **TINY_DECODER, head_dim=16, attention_chunk_size=16, num_local_experts=2, intermediate_size_mlp=64
    )
    assert "mask that is not a causal one" in refusal(config)


def test_attention_to_later_tokens_is_refused():
    config = transformers.Gemma3TextConfig(**TINY_DECODER, head_dim=16, use_bidirectional_attention=True)
    assert "attends to later tokens" in refusal(config)


class Meddled(transformers.models.llama.modeling_llama.LlamaAttention):
    """A layer that passes one more argument to its attention function."""

    extra: dict = {}  # noqa: RUF012

    def forward(self, *arguments, **options):
        return super().forward(*arguments, **options, **self.extra)


@pytest.mark.parametrize(
    "extra", [{"position_bias": torch.ones(1)}, {"is_causal": False}, {"dropout_mask": 1}, {"output_attentions": True}]
)
def test_arguments_that_are_not_understood_are_refused_by_name(extra):
    model = random_model(transformers.LlamaConfig(**TINY_DECODER))
    for layer in model.model.layers:
        layer.self_attn.__class__ = Meddled
        layer.self_attn.extra = extra
    with pytest.raises(ModelRefused, match=f"passes {next(iter(extra))}="):
        prove(model, 256)


def test_a_model_that_makes_its_own_positions_is_refused(monkeypatch):
    model = random_model(transformers.LlamaConfig(**TINY_DECODER))
    rotary = model.model.rotary_emb.forward
    counted = torch.arange(5)[None]
    monkeypatch.setattr(model.model.rotary_emb, "forward", lambda x, position_ids: rotary(x, counted))
    with pytest.raises(ModelRefused, match="does not take its positions from position_ids"):
        prove(model, 256)


def test_a_window_that_only_the_mask_knows_is_refused(monkeypatch):
    model = random_model(transformers.MistralConfig(**TINY_DECODER, sliding_window=WINDOW))
    original = transformers.models.mistral.modeling_mistral.MistralAttention.forward

    def without_window(self, *arguments, **options):
        config, self.config = self.config, transformers.MistralConfig(sliding_window=None)
        self.config._attn_implementation = config._attn_implementation
        try:
            return original(self, *arguments, **options)
        finally:
            self.config = config

    monkeypatch.setattr(transformers.models.mistral.modeling_mistral.MistralAttention, "forward", without_window)
    with pytest.raises(ModelRefused, match="not a causal one with a window of None"):
        prove(model, 256)
