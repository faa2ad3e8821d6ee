"""Proves at load that a model's attention is understood, by one small forward pass through a hook that only looks.

Transformers lets a model call the hook in any way. A model whose layers do not all call it, or that passes something
our kernels do not know and that would change the result, would be served wrong without a sign; it is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from executor_svc.refusal import ModelRefused

PROOF_NAME = "paged_attention_proof"
NUM_TOKENS = 5
MAX_MASK_LENGTH = 1 << 16  # masks are compared up to this position
_ATTRIBUTE = "paged_proof"

_HONOURED = {"scaling", "sliding_window", "softcap", "s_aux"}
# Where the tokens are (which we know), and what else to return (which we do not ask for).
_HARMLESS = {"position_ids", "cache_position", "use_cache", "return_dict"}
# These must be absent, or say what goes without saying.
_ONLY = {"dropout": (0,), "is_causal": (True,), "output_attentions": (False,), "output_hidden_states": (False,)}


@dataclass(frozen=True, slots=True)
class ProvenLayer:
    """An attention layer, and the shape of what it keeps for each token."""

    module: torch.nn.Module
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Mask:
    """Stands where a mask would be: the rule by which transformers would have made it."""

    allows: Callable[..., torch.Tensor]


@dataclass
class _Proof:
    mask_length: int
    layers: list[ProvenLayer] = field(default_factory=list)


def prove(model: PreTrainedModel, max_model_len: int) -> list[ProvenLayer]:
    """The model's attention layers in the order of their calls. Raises ModelRefused.

    Leaves the model with the proof's attention function; the caller sets the one to serve with.
    """
    AttentionInterface.register(PROOF_NAME, _look)
    AttentionMaskInterface.register(PROOF_NAME, _describe_mask)
    proof = _Proof(mask_length=min(max_model_len, MAX_MASK_LENGTH))
    for module in model.modules():
        setattr(module, _ATTRIBUTE, proof)
    try:
        model.set_attn_implementation(PROOF_NAME)
        tokens = torch.arange(NUM_TOKENS, device=model.device)[None]
        with torch.inference_mode():
            model(input_ids=tokens, position_ids=tokens, use_cache=False)
    except ModelRefused:
        raise
    except Exception as error:
        # Whatever the model's own code raises means the same.
        raise ModelRefused(
            f"{type(model).__name__} does not run with an attention function of ours: {type(error).__name__}: {error}"
        ) from error
    finally:
        for module in model.modules():
            delattr(module, _ATTRIBUTE)
    _check_calls(model, proof.layers)
    return proof.layers


def _look(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """The hook of the proof: checks what a layer passes, and gives zeros."""
    proof: _Proof = getattr(module, _ATTRIBUTE)
    name = type(module).__name__
    _check_arguments(name, arguments)
    if getattr(module, "is_causal", True) is False:
        raise ModelRefused(f"{name} attends to later tokens; only causal attention can be served")
    num_heads = query.shape[1]
    if query.shape[:1] != (1,) or {t.shape[2] for t in (query, key, value)} != {NUM_TOKENS}:
        raise ModelRefused(f"{name} passes queries of shape {list(query.shape)} and keys of shape {list(key.shape)}")
    if num_heads % key.shape[1] or key.shape[1] != value.shape[1] or query.shape[3] != key.shape[3]:
        raise ModelRefused(f"{name} passes heads that do not fit together: {list(query.shape)}, {list(key.shape)}")
    if isinstance(attention_mask, _Mask):
        _check_mask(name, attention_mask, arguments.get("sliding_window"), proof.mask_length, query.device)
    elif attention_mask is not None:
        raise ModelRefused(f"{name} passes a mask of its own making ({type(attention_mask).__name__})")
    proof.layers.append(ProvenLayer(module, key.shape[1], key.shape[3], value.shape[3], key.dtype))
    return query.new_zeros(1, NUM_TOKENS, num_heads, value.shape[3]), None


def _describe_mask(*, mask_function: Callable[..., torch.Tensor], **_: object) -> _Mask:
    return _Mask(mask_function)


def _check_arguments(name: str, arguments: dict[str, Any]) -> None:
    for argument, value in arguments.items():
        known = argument in _HONOURED or argument in _HARMLESS
        if not known and value is not None and value not in _ONLY.get(argument, ()):
            raise ModelRefused(f"{name} passes {argument}={value!r} to its attention function, which is not understood")


def _check_mask(name: str, mask: _Mask, window: int | None, length: int, device: torch.device) -> None:
    """Compare the mask that transformers would make with what our kernels make of the window, at telling queries."""
    near = {0, 1, 2, NUM_TOKENS, length - 1} | {1 << bit for bit in range(length.bit_length())}
    near |= {(window or 0) * times + shift for times in (1, 2) for shift in (-1, 0, 1)}
    queries = torch.tensor(sorted(q for q in near if 0 <= q < length), device=device)[:, None]
    keys = torch.arange(length, device=device)[None]
    zero = torch.zeros((), dtype=torch.int64, device=device)
    expected = keys <= queries
    if window is not None:
        expected = expected & (keys > queries - window)
    if not torch.equal(mask.allows(zero, zero, queries, keys).expand_as(expected), expected):
        raise ModelRefused(f"{name} has an attention mask that is not a causal one with a window of {window}")


def _check_calls(model: PreTrainedModel, layers: list[ProvenLayer]) -> None:
    num_layers = model.config.get_text_config().num_hidden_layers
    num_modules = len({id(layer.module) for layer in layers})
    if len(layers) != num_layers or num_modules != num_layers:
        raise ModelRefused(
            f"{type(model).__name__} has {num_layers} layers, but the attention function was called {len(layers)} "
            f"times by {num_modules} of them; only models that call it once a layer can be served"
        )
