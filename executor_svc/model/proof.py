"""Proves at load that a model's attention is understood, by two small forward passes through a hook that only looks.

Transformers lets a model call the hook in any way. A model whose layers do not all call it, or that passes something
our kernels do not know and that would change the result, would be served wrong without a sign; it is refused. So is
one whose tokens meet anywhere else than in attention (in a convolution, a recurrent state): tokens of different
sequences lie side by side in a step. The hook gives zeros, so that in the second pass, of equal tokens at equal
positions, whatever still differs from token to token comes from such a place, or from positions that are not ours.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from executor_svc.model.refusal import ModelRefused

PROOF_NAME = "paged_attention_proof"
NUM_TOKENS = 5
MAX_MASK_LENGTH = 1 << 16  # masks are compared up to this position
# Between tokens that should be equal, of the largest value: what rounding may do.
_SPREAD_ALLOWED = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.03}
_ATTRIBUTE = "paged_proof"

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


@dataclass(frozen=True, slots=True)
class _Mask:
    """Stands where a mask would be: the rule by which transformers would have made it."""

    allows: Callable[..., torch.Tensor]


class _Look(Protocol):
    """What a pass does with each call of the hook."""

    def __call__(
        self,
        module: torch.nn.Module,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: object,
        arguments: dict[str, Any],
    ) -> None: ...


def prove(model: PreTrainedModel, max_model_len: int) -> list[ProvenLayer]:
    """The model's attention layers in the order of their calls. Raises ModelRefused.

    Leaves the model with the proof's attention function; the caller sets the one to serve with.
    """
    if getattr(model, "_is_stateful", False):
        raise ModelRefused(f"{type(model).__name__} keeps a state beside keys and values, which is not supported")
    AttentionInterface.register(PROOF_NAME, _hook)
    AttentionMaskInterface.register(PROOF_NAME, _describe_mask)
    layers = _Layers(mask_length=min(max_model_len, MAX_MASK_LENGTH))
    spread = _Spread()
    try:
        model.set_attn_implementation(PROOF_NAME)
        ascending = torch.arange(NUM_TOKENS, device=model.device)[None]
        _pass(model, layers, ascending)
        _check_calls(model, layers.found)
        logits = _pass(model, spread, torch.ones_like(ascending))
    except ModelRefused:
        raise
    except Exception as error:
        # Whatever the model's own code raises means the same.
        raise ModelRefused(
            f"{type(model).__name__} does not run with an attention function of ours: {type(error).__name__}: {error}"
        ) from error
    spread.add("logits", logits)
    spread.check(type(model).__name__, model.dtype)
    return layers.found


def _pass(model: PreTrainedModel, look: _Look, tokens: torch.Tensor) -> torch.Tensor:
    """`tokens` `[1, NUM_TOKENS]` are ids and positions at once. Returns logits `[NUM_TOKENS, vocab]`."""
    modules = list(model.modules())
    for module in modules:
        setattr(module, _ATTRIBUTE, look)
    try:
        with torch.inference_mode():
            logits: torch.Tensor = model(input_ids=tokens, position_ids=tokens, use_cache=False).logits[0]
            return logits
    finally:
        for module in modules:
            delattr(module, _ATTRIBUTE)


def _hook(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    getattr(module, _ATTRIBUTE)(module, (query, key, value), attention_mask, arguments)
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


class _Layers:
    """The first pass: who calls, with which heads, mask and arguments."""

    def __init__(self, mask_length: int) -> None:
        self._mask_length = mask_length
        self.found: list[ProvenLayer] = []

    def __call__(
        self,
        module: torch.nn.Module,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: object,
        arguments: dict[str, Any],
    ) -> None:
        name, (_, key, value) = type(module).__name__, heads
        _check_arguments(name, arguments)
        if getattr(module, "is_causal", True) is False:
            raise ModelRefused(f"{name} attends to later tokens; only causal attention can be served")
        _check_heads(name, *heads)
        if isinstance(mask, _Mask):
            _check_mask(name, mask, arguments.get("sliding_window"), self._mask_length, key.device)
        elif mask is not None:
            raise ModelRefused(f"{name} passes a mask of its own making ({type(mask).__name__})")
        self.found.append(ProvenLayer(module, key.shape[1], key.shape[3], value.shape[3], key.dtype))


class _Spread:
    """The second pass: how far tokens that should be equal are apart."""

    def __init__(self) -> None:
        self._most, self._where = 0.0, ""

    def __call__(
        self,
        module: torch.nn.Module,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        mask: object,
        arguments: dict[str, Any],
    ) -> None:
        for name, tensor in zip(("queries", "keys", "values"), heads, strict=True):
            self.add(f"{name} of {type(module).__name__}", tensor[0].transpose(0, 1))

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """tensor: `[NUM_TOKENS, ...]`."""
        values = tensor.float()
        spread = float((values - values[:1]).abs().max() / values.abs().max().clamp_min(1e-30))
        if not spread <= self._most:  # NaN counts as more
            self._most, self._where = spread, name

    def check(self, model_name: str, dtype: torch.dtype) -> None:
        if not self._most <= _SPREAD_ALLOWED[dtype]:
            raise ModelRefused(
                f"{model_name} mixes tokens outside of attention, or does not take its positions from position_ids: "
                f"equal tokens at equal positions differ by {self._most:.2g} in the {self._where}"
            )


def _check_heads(name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    shapes = ", ".join(str(list(tensor.shape)) for tensor in (query, key, value))
    if query.shape[0] != 1 or {tensor.shape[2] for tensor in (query, key, value)} != {NUM_TOKENS}:
        raise ModelRefused(f"{name} passes heads of shape {shapes}, which must be [1, heads, {NUM_TOKENS}, dim]")
    if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1] or query.shape[3] != key.shape[3]:
        raise ModelRefused(f"{name} passes heads that do not fit together: {shapes}")


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
