"""Our attention behind the hook of transformers: writes a layer's keys and values to their slots, then attends.

A model is told by name which attention function to use, and its layers call that function with themselves as the
first argument. What the function needs besides is hung on the layer, so nothing is global: each model in a process
has layers of its own.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from kernels import Backend, Projection, Rows, Rule
from kernels.cpu.decoder_layer import DecoderLayer

ATTENTION_NAME = "paged_attention"
_ATTRIBUTE = "paged_layer"


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step as the kernels take it, on the device; shapes as in `executor_svc.step.Step`."""

    slots: torch.Tensor  # int64
    rows: Rows


class CurrentStep:
    """The step that a model's layers work on. One for each model; set by its runner, read by its layers."""

    def __init__(self) -> None:
        self.tensors: StepTensors | None = None


@dataclass(slots=True, eq=False)
class PagedLayer:
    """What hangs on an attention layer: its own caches, and what it shares with the other layers of the model."""

    backend: Backend
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    step: CurrentStep
    window: int | None  # as proved: what a model says of it beside its mask may be left out
    _rule: Rule | None = field(default=None, init=False)

    def rule(self, scale: float, soft_cap: float | None, sinks: torch.Tensor | None) -> Rule:
        """The layer's, of what its model hands over in each step; made anew only where that has changed."""
        rule = self._rule
        if rule is None or rule.sinks is not sinks or (rule.scale, rule.soft_cap) != (scale, soft_cap):
            rule = self._rule = Rule(scale, self.window, soft_cap, sinks)
        return rule

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> torch.Tensor:
        """q, k, v: `[num_tokens, heads, dim]`. Returns `[num_tokens, heads, value dim]`."""
        step = self._current()
        self.backend.write_kv(k, v, self.key_cache, self.value_cache, step.slots)
        return self.backend.paged_attention(q, self.key_cache, self.value_cache, step.rows, rule)

    def attend_projected(
        self,
        qkv: torch.Tensor,
        projection: Projection,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        rule: Rule,
    ) -> torch.Tensor:
        """The same of heads that are still to be normed and rotated, as `projection` says: qkv `[num_tokens, all heads
        of queries, keys and values · dim]`, cos and sin `[num_tokens, rotated numbers]`. Returns
        `[num_tokens, heads · dim]`."""
        step, attend_projected = self._current(), self.backend.attend_projected
        if attend_projected is None:
            raise RuntimeError(f"the {self.backend.name} kernels attend to heads alone")
        caches = self.key_cache, self.value_cache
        return attend_projected(qkv, projection, cos, sin, step.slots, *caches, step.rows, rule)

    def attend_within(
        self, layer: DecoderLayer, hidden_states: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None
    ) -> torch.Tensor:
        """What the decoder layer around this attention makes of `[1, num_tokens, width]`; for caches in the native
        layout."""
        step = self._current()
        return layer(hidden_states, cos, sin, step.slots, self.key_cache, self.value_cache, step.rows)

    def _current(self) -> StepTensors:
        if self.step.tensors is None:
            raise RuntimeError("the model was called outside of a step of its runner")
        return self.step.tensors


def attach(module: torch.nn.Module, layer: PagedLayer) -> None:
    """Make `module`, an attention layer, use `layer` from now on."""
    setattr(module, _ATTRIBUTE, layer)


def detach(module: torch.nn.Module) -> None:
    """Undo `attach`."""
    delattr(module, _ATTRIBUTE)


def layer_of(module: torch.nn.Module) -> PagedLayer:
    """What is attached to `module`."""
    layer: PagedLayer = getattr(module, _ATTRIBUTE)
    return layer


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """The hook. query, key, value: `[1, heads, num_tokens, dim]`; returns `[1, num_tokens, heads, value dim]`.

    There is no mask: causality, window and the rows' borders are the kernel's. That a model passes nothing else
    which matters was proved when it was loaded (`executor_svc.model.proof`).
    """
    return attend_with(layer_of(module), query, key, value, **arguments), None


def attend_with(
    layer: PagedLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> torch.Tensor:
    """What the hook does for `layer`; shapes as there."""
    attended = layer.attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        layer.rule(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux),
    )
    return attended.unsqueeze(0)


def register() -> None:
    """Make the hook known to transformers. No mask function goes with it, so no mask is made."""
    AttentionInterface.register(ATTENTION_NAME, attend)
