"""Rotary embeddings whose factors depend on a sequence's length, made to depend on each token's own sequence.

Transformers looks at the highest position of a forward pass and takes the factors of that length for all its tokens.
A step of ours has tokens of many sequences, so here each token says whether its sequence is a long one:

* `longrope` has two sets of factors, for sequences of up to its original length and for longer ones. Both results are
  computed and one is taken for each token.
* `dynamic` has factors of its own for every length past the original one, so keys in a cache cannot be right there.
  Its sequences end at that length (`executor_svc.model.facts.model_len`), below which the factors are fixed. So do
  those of PhiMoE, of whose `longrope` transformers computes only the short half.

What a model's rotary module computes from its frequencies is left to its own code, without the part that chooses them.
Nothing waits for the device, and shapes do not depend on lengths.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from executor_svc.model.refusal import ModelRefused

_CHOOSES_BY_LENGTH = ("dynamic", "longrope")

Turns = torch.Tensor | tuple[torch.Tensor, ...]
# A rotary module, which has attributes that its base class does not know.
Module = Any


class LongTokens:
    """Which tokens of the current step belong to long sequences. One for each model; set by its runner."""

    def __init__(self) -> None:
        self.flags: torch.Tensor | None = None  # bool [num_tokens], on the model's device; None: no token does


def install(model: PreTrainedModel, switch_len: int) -> LongTokens:
    """Make the model's rotary modules ask the returned object instead of the highest position.

    `switch_len` is the longest sequence with short factors, 0 if there are no longer ones (as in `ModelFacts`). Raises
    ModelRefused where a module is not understood and sequences may pass that length.
    """
    long_tokens = LongTokens()
    switches = False
    module: Module
    for module in list(model.modules()):
        kinds = rope_kinds(module)
        if not set(kinds.values()) & set(_CHOOSES_BY_LENGTH):
            continue
        whole = type(module).forward
        # To its very inside: what chooses may itself be wrapped, as transformers 5.17 does by torch.no_grad.
        forward = inspect.unwrap(whole)
        if forward is whole:
            continue
        rotary = _Rotary(module, forward, kinds if switch_len else {}, long_tokens)
        if switch_len:
            _check(module, rotary, kinds, switch_len, model.dtype)
        module.forward = rotary
        switches |= "longrope" in kinds.values()
    if switch_len and not switches:
        raise ModelRefused(
            f"{type(model).__name__} turns keys of sequences of more than {switch_len} tokens by other factors, in a "
            f"way that is not understood; set max_model_len to {switch_len} or less"
        )
    return long_tokens


def rope_kinds(module: Module) -> dict[str | None, str]:
    """The rope type of each type of layer that a rotary module serves; of None, where it knows only one."""
    kinds = getattr(module, "rope_type", None)
    if isinstance(kinds, str):
        return {None: kinds}
    return dict(kinds) if isinstance(kinds, dict) else {}


class _Rotary:
    """Stands for a rotary module's forward."""

    def __init__(
        self,
        module: Module,
        forward: Callable[..., Turns],
        kinds: dict[str | None, str],
        long_tokens: LongTokens,
    ) -> None:
        self._forward = forward
        self._long_tokens = long_tokens
        # Copies, whose frequencies nobody changes.
        self._short, self._long = _settled(module), _settled(module)
        for layer_type, kind in kinds.items():
            if kind == "longrope":
                setattr(self._long, _name("inv_freq", layer_type), _long_frequencies(module, layer_type))

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, *layer_type: str, **options: Any) -> Turns:
        """x: any tensor of the wanted type, on the device. position_ids: `[1, num_tokens]`."""
        short = self._forward(self._short, x, position_ids, *layer_type, **options)
        if self._long_tokens.flags is None:
            return short
        long = self._forward(self._long, x, position_ids, *layer_type, **options)
        is_long = self._long_tokens.flags[:, None]  # results are [..., num_tokens, dim]
        chosen = [torch.where(is_long, *pair) for pair in zip(_parts(long), _parts(short), strict=True)]
        return chosen[0] if isinstance(short, torch.Tensor) else tuple(chosen)


def _parts(turns: Turns) -> tuple[torch.Tensor, ...]:
    return (turns,) if isinstance(turns, torch.Tensor) else turns


def _settled(module: Module) -> Module:
    """A copy of the module as it is for short sequences."""
    settled = copy.deepcopy(module)
    if hasattr(settled, "rope_init_fn"):  # PhiMoE computes its frequencies, and chooses its scale, in each pass
        parameters, frequencies = settled.config.rope_parameters, settled.inv_freq
        scale = parameters["short_mscale"]
        parameters["rope_type"] = "default"
        settled.rope_init_fn = lambda config: (frequencies, scale)
    return settled


def _name(what: str, layer_type: str | None) -> str:
    return what if layer_type is None else f"{layer_type}_{what}"


def _original_len(module: Module, layer_type: str | None) -> int:
    parameters = module.config.rope_parameters
    length: int = (parameters if layer_type is None else parameters[layer_type])["original_max_position_embeddings"]
    return length


def _long_frequencies(module: Module, layer_type: str | None) -> torch.Tensor:
    device = getattr(module, _name("inv_freq", layer_type)).device
    options = {} if layer_type is None else {"layer_type": layer_type}
    past = _original_len(module, layer_type) + 1
    frequencies: torch.Tensor = ROPE_INIT_FUNCTIONS["longrope"](module.config, device, seq_len=past, **options)[0]
    return frequencies


def _check(module: Module, rotary: _Rotary, kinds: dict[str | None, str], switch_len: int, dtype: torch.dtype) -> None:
    """Compare with the module's own way, in which a short and a long sequence take a pass each."""
    own = copy.deepcopy(module)
    device = next(own.buffers()).device
    x = torch.zeros(1, 1, 1, dtype=dtype, device=device)
    short = torch.tensor([[0, 1, 2, switch_len - 1]], device=device)
    long = torch.tensor([[0, 1, 2, switch_len]], device=device)
    is_long = torch.tensor([False] * 4 + [True] * 4, device=device)
    for layer_type in kinds:
        options = {} if layer_type is None else {"layer_type": layer_type}
        with torch.inference_mode():
            apart = [_columns(own(x, positions, **options)) for positions in (short, long)]
            rotary._long_tokens.flags = is_long
            try:
                together = _columns(rotary(x, torch.cat((short, long), dim=1), **options))
            finally:
                rotary._long_tokens.flags = None
        if not torch.equal(together, torch.cat(apart, dim=-2)):
            raise ModelRefused(
                f"{type(module).__name__} turns keys of sequences of more than {switch_len} tokens in a way that is "
                f"not understood; set max_model_len to {switch_len} or less"
            )


def _columns(turns: Turns) -> torch.Tensor:
    """`[..., num_tokens, all that there is of a token]`."""
    return torch.cat(_parts(turns), dim=-1)
