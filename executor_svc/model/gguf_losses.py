"""What transformers does not read of a GGUF file. A model without it runs, and answers wrong; so it is refused.

Shapes are not looked at here: where they are lost, weights do not fit.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from executor_svc.model.refusal import ModelRefused

# How texts are taken apart, by names of llama.cpp: with the pattern of GPT-2.
_LIKE_GPT2 = {"gpt-2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe", "jina-es", "jina-de", "jina-v1-en", "gigachat"}
# Setting, names that transformers has for it, and values that mean nothing.
_SETTINGS = {
    "rope.freq_base": ((), ()),  # among the rotary parameters
    "attention.sliding_window": (("sliding_window",), (0,)),
    "attention.clamp_kqv": (("clip_qkv",), (0,)),
    "attention.scale": (("attention_multiplier",), (0,)),
    "attention.layer_norm_epsilon": (("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"), ()),
    "attention.layer_norm_rms_epsilon": (("rms_norm_eps", "norm_eps"), ()),
    "attn_logit_softcapping": (("attn_logit_softcapping",), (0,)),
    "final_logit_softcapping": (("final_logit_softcapping",), (0,)),
    "router_logit_softcapping": (("router_logit_softcapping",), (0,)),
    "embedding_scale": (("embedding_multiplier",), (0, 1)),
    "residual_scale": (("residual_multiplier",), (0, 1)),
    "logit_scale": (("logit_scale", "logits_scaling"), (0, 1)),
    "expert_used_count": (("num_experts_per_tok",), (0,)),
    "expert_weights_norm": (("norm_topk_prob",), ()),
    "expert_weights_scale": (("routed_scaling_factor",), (0, 1)),
}
# Families whose scale of attention is another in their largest model, and in no file.
_UNWRITTEN_SCALE = {("gemma2", 46), ("gemma3_text", 62)}


def check_losses(gguf_file: Path, reader: Any, config: Any, tokenizer: Any) -> None:
    """`reader` is the file, `config` and `tokenizer` are what came of it. Raises ModelRefused."""
    fields = {
        name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.ggml.t")
    }
    text = config.get_text_config()
    lost = (
        _lost_setting(fields, text)
        or _lost_rotation(reader, fields, text)
        or _lost_text_rule(fields, tokenizer)
        or ("attention.scale" if (text.model_type, text.num_hidden_layers) in _UNWRITTEN_SCALE else None)
    )
    if lost:
        raise ModelRefused(
            f"{gguf_file}: {lost} gets lost when transformers reads a GGUF file of a {config.model_type}, and answers "
            "would be wrong; use the model's safetensors"
        )


def _lost_setting(fields: Mapping[str, Any], config: Any) -> str | None:
    """One that says something else than the configuration does, with its value."""
    prefix = f"{fields['general.architecture']}."
    for name, (attributes, neutral) in _SETTINGS.items():
        value = fields.get(prefix + name)
        if value is None or value in neutral:
            continue
        if name == "attention.sliding_window" and value >= config.max_position_embeddings:
            continue
        known = [getattr(config, attribute, None) for attribute in attributes]
        if name == "rope.freq_base":
            known = [parameters.get("rope_theta") for parameters in _rope_parameters(config)]
        if not any(_same(value, other) for other in known):
            return f"{prefix}{name} ({value:g})"
    return None


def _same(value: float, other: Any) -> bool:
    return isinstance(other, int | float) and math.isclose(value, other, rel_tol=1e-5)


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or {}
    return [part for part in [parameters, *parameters.values()] if isinstance(part, dict)]


def _lost_rotation(reader: Any, fields: Mapping[str, Any], config: Any) -> str | None:
    """Scaled rotary positions, of which transformers knows nothing for most architectures."""
    scaled = [name for name, value in fields.items() if name.endswith(".rope.scaling.type") and value != "none"]
    # Without a type, a factor is that of linear scaling.
    factors = [name for name in fields if name.endswith((".rope.scaling.factor", ".rope.scale_linear"))]
    untyped = not any(name.endswith(".rope.scaling.type") for name in fields)
    scaled += [name for name in factors if untyped and fields[name] not in (0, 1)]
    scaled += [
        tensor.name
        for tensor in reader.tensors
        if tensor.name.startswith(("rope_freqs", "rope_factors")) and (tensor.data != 1).any()
    ]
    kinds = {parameters.get("rope_type", "default") for parameters in _rope_parameters(config)}
    return f"the scaling of rotary positions ({scaled[0]})" if scaled and kinds <= {"default"} else None


def _lost_text_rule(fields: Mapping[str, Any], tokenizer: Any) -> str | None:
    """How texts are taken apart, or what is put at their ends."""
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind == "gpt2" and tokenizer.backend_tokenizer.pre_tokenizer is not None:
        splits = "Split(" in str(tokenizer.backend_tokenizer.pre_tokenizer)
        like_gpt2 = pre in _LIKE_GPT2 or (pre is None and fields["general.architecture"] == "gpt2")
        if not splits and not like_gpt2:
            return f"how texts are taken apart (tokenizer.ggml.pre = {pre})"
    if kind == "llama":
        begins = tokenizer.tokenize("a")[0].startswith("▁")
        if begins != fields.get("tokenizer.ggml.add_space_prefix", begins):
            return f"tokenizer.ggml.add_space_prefix ({not begins})"
    ids = tokenizer("a").input_ids
    ends = {"bos": ids[0] == tokenizer.bos_token_id, "eos": ids[-1] == tokenizer.eos_token_id}
    for name, added in ends.items():
        # Gemma 4 is trained with a begin token that its chat template writes, whatever the file says.
        if kind != "gemma4" and added != fields.get(f"tokenizer.ggml.add_{name}_token", added):
            return f"tokenizer.ggml.add_{name}_token ({not added})"
    return None
