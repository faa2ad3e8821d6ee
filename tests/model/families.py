"""The families of models that are tried: those that are served, and those that must be refused."""

from typing import Any

import transformers

from tests.tiny_models import TINY_DECODER, VOCAB_SIZE, WINDOW

LOCAL_LOCAL_LOCAL_GLOBAL = ["sliding_attention"] * 3 + ["full_attention"]
LOCAL_GLOBAL = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}  # fmt: skip
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
ALL_HEADS = {"num_key_value_heads": 4}
MAMBA = {"mamba_d_head": 16, "mamba_n_heads": 8, "mamba_d_state": 8}

# By transformers' name for the type; what is not said here is as in TINY_DECODER.
SERVED: dict[str, dict[str, Any]] = {
    "afmoe": {**EXPERTS, "num_dense_layers": 1, "sliding_window": WINDOW, "layer_types": LOCAL_GLOBAL, "head_dim": 16},
    "apertus": {},
    "arcee": {},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},
    "axk1": {**LATENT, **ROUTED_EXPERTS, "n_shared_experts": 1},
    "bert": {"is_decoder": True},
    "bert-generation": {"is_decoder": True},
    "biogpt": {},
    "bitnet": {},
    "codegen": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "cohere": {},
    "cohere2": {"sliding_window": WINDOW, "layer_types": LOCAL_GLOBAL},
    "cohere2_moe": {**EXPERTS, "sliding_window": WINDOW, "layer_types": LOCAL_GLOBAL},
    "cwm": {"sliding_window": WINDOW, "layer_types": LOCAL_GLOBAL, "head_dim": 16},
    "ctrl": {"n_embd": 64, "n_layer": 2, "n_head": 4, "dff": 96},
    "deepseek_v2": {**LATENT, **ROUTED_EXPERTS, "n_shared_experts": 1, "topk_method": "group_limited_greedy"},
    "deepseek_v3": {**LATENT, **ROUTED_EXPERTS},
    "dots1": {**ROUTED_EXPERTS, "head_dim": 16, "n_shared_experts": 1},
    "electra": {"is_decoder": True, "embedding_size": 64},
    "ernie": {"is_decoder": True},
    "ernie4_5": {"head_dim": 16},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 0},
    "exaone4": {"sliding_window": WINDOW, "layer_types": LOCAL_GLOBAL, "head_dim": 16},
    "exaone_moe": {**EXPERTS, "n_group": 1, "topk_group": 1, "sliding_window": WINDOW, "layer_types": LOCAL_GLOBAL},
    "flex_olmo": EXPERTS,
    "gemma": {"head_dim": 24},
    "gemma2": {
        "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW, "layer_types": LOCAL_GLOBAL,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "initializer_range": 0.3,
    },
    "gemma3_text": {
        "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 24, "query_pre_attn_scalar": 24,
        "sliding_window": WINDOW, "layer_types": LOCAL_LOCAL_LOCAL_GLOBAL,
    },
    "gemma4_text": {
        "num_hidden_layers": 4, "head_dim": 16, "global_head_dim": 32, "sliding_window": WINDOW,
        "layer_types": [*LOCAL_GLOBAL, *LOCAL_GLOBAL], "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
    },
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe": {**ROUTED_EXPERTS, "head_dim": 16},
    "glm4_moe_lite": {**LATENT, **ROUTED_EXPERTS},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "gpt_bigcode": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "gpt_neox": {},
    "gpt_oss": {**LOCAL_EXPERTS, "head_dim": 16, "sliding_window": WINDOW, "layer_types": LOCAL_GLOBAL},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "granite": {"attention_multiplier": 0.3, "logits_scaling": 4.0, "residual_multiplier": 0.7},
    "granitemoe": LOCAL_EXPERTS,
    "granitemoeshared": {**LOCAL_EXPERTS, "shared_intermediate_size": 32},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 16},
    "jais2": {},
    "jetmoe": {**LOCAL_EXPERTS, "kv_channels": 16},
    "llama": {},
    "longcat_flash": {
        **LATENT, "num_layers": 2, "ffn_hidden_size": 96, "n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2,
        "expert_ffn_hidden_size": 32, "head_dim": 8, "v_head_dim": 16,
    },
    "minicpm3": LATENT,
    "minimax_m2": {**LOCAL_EXPERTS, "head_dim": 16},
    "mimo_v2_flash": {"head_dim": 16, "v_head_dim": 12, **ROUTED_EXPERTS, "sliding_window": WINDOW},
    "ministral": {"sliding_window": WINDOW, "layer_types": LOCAL_GLOBAL, "head_dim": 16},
    "ministral3": {
        "head_dim": 16,
        "rope_parameters": {  # queries are scaled by their position from the sixteenth on
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 16,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3,
        },
    },
    "mistral": {"sliding_window": WINDOW},
    "mixtral": LOCAL_EXPERTS,
    "modernbert-decoder": {"local_attention": 2 * WINDOW, "layer_types": LOCAL_GLOBAL},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": WINDOW, "layer_types": LOCAL_GLOBAL},
    "olmoe": EXPERTS,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2, "max_position_embeddings": 64},
    "persimmon": {},
    "phi": {},
    "phi3": {"sliding_window": WINDOW},
    "phimoe": {**LOCAL_EXPERTS, "sliding_window": WINDOW},
    "qwen2": {
        "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention"],
    },
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3": {"head_dim": 24},
    "qwen3_moe": {**EXPERTS, "head_dim": 24},
    "seed_oss": {"head_dim": 16},
    "smollm3": {"no_rope_layers": [1, 0]},
    "solar_open": {**ROUTED_EXPERTS, "head_dim": 16},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
    "starcoder2": {"sliding_window": WINDOW},
    "vaultgemma": {
        "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW, "layer_types": LOCAL_GLOBAL,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "initializer_range": 0.3,
    },
    "youtu": LATENT,
    # Of these little is known here but their code.
    "beam": {"sliding_window": WINDOW},
    "flint": {},
    "granite_swa": {"sliding_window": WINDOW},
    "granitemoe_swa": {**LOCAL_EXPERTS, "sliding_window": WINDOW},
    "hy_v3": {**EXPERTS, "head_dim": 16},
    "hyperclovax": {},
    "kolibri1": {**EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 32, "sliding_window": WINDOW},
    "laguna": {**EXPERTS, "head_dim": 16, "sliding_window": WINDOW, "layer_types": LOCAL_GLOBAL},
    "mellum": {**EXPERTS, "head_dim": 16, "sliding_window": WINDOW, "layer_types": LOCAL_GLOBAL},
}  # fmt: skip

# Of these the text model is served, without what sees and hears.
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
SERVED |= {
    "gemma3": {
        "text_config": TINY_DECODER | SERVED["gemma3_text"], "vision_config": VISION, "mm_tokens_per_image": 4,
        "image_token_index": 300, "boi_token_index": 301, "eoi_token_index": 302,
    },
    "gemma4": {
        "text_config": TINY_DECODER | SERVED["gemma4_text"], "audio_config": None,
        "vision_config": {**VISION, "head_dim": 16, "num_key_value_heads": 2},
    },
}  # fmt: skip

REFUSED: dict[str, dict[str, Any]] = {
    "bamba": MAMBA,
    "bart": {},
    "bailing_hybrid": {},
    "big_bird": {"is_decoder": True},
    "bloom": {"n_layer": 2, "n_head": 4},
    "cpmant": {},
    "deepseek_v32": {**LATENT, **ROUTED_EXPERTS},
    "deepseek_v4": {},
    "diffllama": {},
    "doge": {},
    "dory": {},
    "falcon": {},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},
    "falcon_mamba": {},
    "glm_moe_dsa": {**LATENT, **ROUTED_EXPERTS},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "gpt_neox_japanese": {},
    "granitemoehybrid": {},
    "hrm_text": {},
    "gemma3_text": {"head_dim": 16, "use_bidirectional_attention": True},
    "inkling_text": {
        "n_routed_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2, "swa_head_dim": 16, "head_dim": 16, "rel_extent": 32, "n_shared_experts": 1,
    },
    "jamba": {},
    "kimi_linear": {
        **ALL_HEADS, "num_local_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16, "linear_head_dim": 16, "linear_num_heads": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {
        "head_dim": 16, "attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 64,
        "no_rope_layers": [1, 0],
    },
    "mamba": {},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 8},
    "marian": {},
    "mbart": {},
    "minimax": HYBRID,
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2},
    "minimax_m3_vl_text": {
        **LOCAL_EXPERTS, "head_dim": 16, "index_head_dim": 8, "index_n_heads": 2, "index_block_size": 4,
        "index_topk_blocks": 2, "layer_types": ["full_attention", "minimax_m3_sparse"], "rotary_dim": 8,
        "dense_intermediate_size": 96, "shared_intermediate_size": 32,
    },
    "nemotron_h": {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 8, "mamba_head_dim": 16},
    "olmo_hybrid": {},
    "openai-gpt": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "pegasus": {},
    "qwen3_5_text": {},
    "qwen3_next": {
        **EXPERTS, "shared_expert_intermediate_size": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    },
    "recurrent_gemma": {},
    "rembert": {"is_decoder": True},
    "roformer": {"is_decoder": True},
    "rwkv": {},
    "xglm": {"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4},
    "xlm": {"emb_dim": 64, "n_layers": 2, "n_heads": 4},
    "xlstm": {},
}  # fmt: skip


def tiny_config(model_type: str, changes: dict[str, Any]) -> transformers.PreTrainedConfig:
    base = {} if "text_config" in changes else TINY_DECODER
    return transformers.AutoConfig.for_model(model_type, **base | changes)
