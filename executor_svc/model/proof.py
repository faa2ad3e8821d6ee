"""Proves at load that a model's attention is understood, by two small forward passes through a hook that only looks.

Transformers lets a model call the hook in any way. A model whose layers do not all call it, or that passes something
our kernels do not know and that would change the result, would be served wrong without a sign; it is refused. So is
one whose tokens meet anywhere else than in attention (in a convolution, a recurrent state): tokens of different
sequences lie side by side in a step. The hook gives zeros, so that in the second pass, of equal tokens at equal
positions, whatever still differs from token to token comes from such a place, or from positions that are not ours.

What these passes understand, `executor_svc.model.rehearsal` then checks by its results.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from executor_svc.model import looking
from executor_svc.model.looking import Heads
from executor_svc.model.masks import MaskChanged, MaskRule, keep_rule
from executor_svc.model.own_positions import CountingLayers
from executor_svc.model.refusal import ModelRefused

PROOF_NAME = "paged_attention_proof"
NUM_TOKENS = 11  # no size that a model has
# Between tokens that should be equal, of the largest value: what rounding may do.
_SPREAD_ALLOWED = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.03}

_HONOURED = {"scaling", "sliding_window", "softcap", "s_aux"}
# Where the tokens are (which we know), and what else to return (which we do not ask for).
_HARMLESS = {"position_ids", "cache_position", "use_cache", "return_dict"}
# These must be absent, or say what goes without saying.
_ONLY = {
    "dropout": (0,),
    "is_causal": (True,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_router_logits": (False,),
}


@dataclass(frozen=True, slots=True)
class ProvenLayer:
    """An attention layer, and the shape of what it keeps for each token."""

    module: torch.nn.Module
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int | None = None  # how many tokens a query sees, its own among them; None for all


def prove(model: PreTrainedModel, max_model_len: int) -> list[ProvenLayer]:
    """The model's attention layers in the order of their calls. Raises ModelRefused.

    Leaves the model with the proof's attention function; the caller sets the one to serve with.
    """
    if getattr(model, "_is_stateful", False):
        raise ModelRefused(
            f"{type(model).__name__} keeps a state beside keys and values (a recurrent or convolution state), "
            "which is not supported"
        )
    looking.register(PROOF_NAME, keep_rule)
    layers = _Layers(max_model_len)
    try:
        ascending = torch.arange(NUM_TOKENS, device=model.device).clamp_max(max_model_len - 1)
        _pass(model, layers, ascending)
        _check_calls(model, layers.found)
        with CountingLayers([layer.module for layer in layers.found], NUM_TOKENS) as counting:
            spread = _Spread(counting)
            logits = _pass(model, spread, torch.full_like(ascending, min(1, max_model_len - 1)))
    except ModelRefused:
        raise
    except MaskChanged as error:
        raise ModelRefused(
            f"{type(model).__name__} chooses by itself which tokens its queries see (sparse attention, for example), "
            "which is not supported"
        ) from error
    except Exception as error:
        # Whatever the model's own code raises means the same.
        raise ModelRefused(
            f"{type(model).__name__} does not run with an attention function of ours: {type(error).__name__}: {error}"
        ) from error
    if counting.found:
        raise ModelRefused(
            f"{type(counting.found[0]).__name__} counts the positions of its tokens by itself, which is wrong where "
            "several sequences are computed together"
        )
    spread.add("logits", logits)
    spread.check(type(model).__name__, model.dtype)
    return layers.found


def _pass(model: PreTrainedModel, look: looking.Look, tokens: torch.Tensor) -> torch.Tensor:
    """`tokens` `[NUM_TOKENS]` are positions, and ids as far as there are."""
    ids = tokens % model.config.get_text_config().vocab_size
    return looking.forward(model, PROOF_NAME, look, ids, position_ids=tokens[None])


def _zeros(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


class _Layers:
    """The first pass: who calls, with which heads, mask and arguments."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self.found: list[ProvenLayer] = []

    def __call__(self, module: torch.nn.Module, heads: Heads, mask: object, arguments: dict[str, Any]) -> torch.Tensor:
        name, (query, key, value) = type(module).__name__, heads
        _check_arguments(name, arguments)
        if getattr(module, "is_causal", True) is False:
            raise ModelRefused(f"{name} attends to later tokens; only causal attention can be served")
        _check_heads(name, *heads)
        window = arguments.get("sliding_window")
        if isinstance(mask, MaskRule):
            window = mask.window(name, window, self._max_model_len, key.device)
        elif mask is not None:
            raise ModelRefused(f"{name} passes a mask of its own making ({type(mask).__name__})")
        self.found.append(ProvenLayer(module, key.shape[1], key.shape[3], value.shape[3], key.dtype, window))
        return _zeros(query, value)


class _Spread:
    """The second pass: how far tokens that should be equal are apart."""

    def __init__(self, counting: CountingLayers) -> None:
        self._counting = counting
        self._most, self._where = 0.0, ""

    def __call__(self, module: torch.nn.Module, heads: Heads, mask: object, arguments: dict[str, Any]) -> torch.Tensor:
        self._counting.attending()
        for name, tensor in zip(("queries", "keys", "values"), heads, strict=True):
            self.add(f"{name} of {type(module).__name__}", tensor[0].transpose(0, 1))
        return _zeros(heads[0], heads[2])

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """tensor: `[NUM_TOKENS, ...]`."""
        values = hidden_as_zero(tensor).float()
        spread = float((values - values[:1]).abs().max() / values.abs().max().clamp_min(1e-30))
        if not (spread <= self._most or math.isnan(self._most)):  # NaN counts as more than all
            self._most, self._where = spread, name

    def check(self, model_name: str, dtype: torch.dtype) -> None:
        if not self._most <= _SPREAD_ALLOWED[dtype]:
            raise ModelRefused(
                f"{model_name} mixes tokens outside of attention, or does not take its positions from position_ids: "
                f"equal tokens at equal positions differ by {self._most:.2g} in the {self._where}"
            )


def hidden_as_zero(tensor: torch.Tensor) -> torch.Tensor:
    """Logits of tokens that a model never wants are the least there is; beside them all others would look alike."""
    return tensor.masked_fill(tensor <= torch.finfo(tensor.dtype).min, 0)


def _check_heads(name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    shapes = ", ".join(str(list(tensor.shape)) for tensor in (query, key, value))
    if query.shape[0] != 1 or {tensor.shape[2] for tensor in (query, key, value)} != {NUM_TOKENS}:
        raise ModelRefused(f"{name} passes heads of shape {shapes}, which must be [1, heads, {NUM_TOKENS}, dim]")
    if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1] or query.shape[3] != key.shape[3]:
        raise ModelRefused(f"{name} passes heads that do not fit together: {shapes}")


def _check_arguments(name: str, arguments: dict[str, Any]) -> None:
    for argument, value in arguments.items():
        known = argument in _HONOURED or argument in _HARMLESS
        if not known and value is not None and value not in _ONLY.get(argument, ()):
            shown = f"a tensor of {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise ModelRefused(f"{name} passes {argument} ({shown}) to its attention function, which is not understood")


def _check_calls(model: PreTrainedModel, layers: list[ProvenLayer]) -> None:
    name, num_modules = type(model).__name__, len({layer.module for layer in layers})
    if not layers:
        raise ModelRefused(f"{name} has an attention of its own, which cannot be replaced by ours")
    if num_modules < len(layers):
        raise ModelRefused(
            f"{name} attends more than once in a layer ({len(layers)} times in {num_modules} layers), "
            "which takes more keys and values than there is memory for"
        )
