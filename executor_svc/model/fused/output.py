"""The ends of a model: its output head, whose logits a greedy row need not see, and an embedding that shares the
head's weights."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from executor_svc.model import looking
from executor_svc.model.fused.products import Product
from executor_svc.model.fused.structure import is_plain, is_untouched
from executor_svc.model.proof import hidden_as_zero
from kernels.cpu import linear as native

NAME = "paged_attention_zeros"
_NUM_TOKENS = 5
# Between logits and what the head gives for the decoder's last hidden states, when they are the same but for a factor;
# of the largest one. Each of them counts: one of 262,144 that is another may be the likeliest.
_ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 0.02}


@dataclass(frozen=True, slots=True)
class PackedEmbedding:
    """Stands for an embedding's `forward`: rows of the head's weight, times `scale`."""

    weight: native.PackedWeight
    scale: torch.Tensor | None

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        rows = native.unpack_rows(self.weight, input)
        return rows if self.scale is None else rows * self.scale


def understand_embedding(module: nn.Module) -> tuple[bool, torch.Tensor | None]:
    """Whether the module looks its weights up and does no more than to multiply them, and by what."""
    if not isinstance(module, nn.Embedding) or not is_untouched(module) or not is_plain(module.weight):
        return False, None
    ids = torch.arange(min(module.num_embeddings, 64))
    rows, own = functional.embedding(ids, module.weight), module(ids)
    numbers = [value for value in vars(module).values() if isinstance(value, int | float)]
    numbers += [buffer.item() for buffer in module.buffers() if buffer.numel() == 1]
    for scale in [None, *(torch.tensor(number, dtype=rows.dtype) for number in numbers)]:
        if torch.equal(rows if scale is None else rows * scale, own):
            return True, scale
    return False, None


@dataclass(frozen=True, slots=True)
class GreedyHead:
    """The likeliest tokens of hidden states, without logits in memory."""

    weight: native.PackedWeight
    bias: torch.Tensor | None
    soft_cap: float | None

    def __call__(self, hidden: torch.Tensor, num_ids: int) -> torch.Tensor:
        """hidden: `[rows, width]`. int64 `[rows]` below `num_ids`; -1 where a row's logits are not finite."""
        ids, finite = native.linear_argmax(hidden, self.weight, self.bias, self.soft_cap, num_ids)
        return ids.masked_fill_(~finite, -1)


@dataclass(frozen=True, slots=True)
class HeadRule:
    """How logits follow from the head's product with the decoder's last hidden states: a positive factor, and a cap."""

    soft_cap: float | None

    def greedy(self, product: Product) -> GreedyHead | None:
        weight = product.weight
        return GreedyHead(weight, product.bias, self.soft_cap) if isinstance(weight, native.PackedWeight) else None


def understand_head(model: PreTrainedModel) -> HeadRule | None:
    """None where the largest logit need not be that of the head's largest output."""
    head, decoder = model.get_output_embeddings(), model.base_model
    if head is None or decoder is model or model.dtype not in _ALLOWED:
        return None
    looking.register(NAME)
    ids = torch.arange(_NUM_TOKENS) % model.config.get_text_config().vocab_size
    inputs = {"position_ids": torch.arange(_NUM_TOKENS)[None]}
    own = looking.forward(model, NAME, _zeros, ids, **inputs)
    logits = hidden_as_zero(own).float()
    made = looking.without_logits(model, NAME, _zeros, ids, **inputs)
    hidden = getattr(made, "last_hidden_state", None)
    if hidden is None:
        return None
    with torch.inference_mode():
        raw = head(hidden)[0].float()
    if raw.shape != logits.shape or not torch.equal(logits, own.float()):
        return None  # there are tokens that the model never wants, and the head does not know it
    allowed = _ALLOWED[model.dtype]
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if cap and _off(cap * torch.tanh(raw / cap), logits) <= allowed:
        return HeadRule(float(cap))
    factor = float((raw * logits).sum() / raw.square().sum())
    return HeadRule(None) if factor > 0 and _off(raw * factor, logits) <= allowed else None


def _off(found: torch.Tensor, logits: torch.Tensor) -> float:
    """By how much the worst of them, relative to its row's largest."""
    return float(((found - logits).abs().amax(-1) / logits.abs().amax(-1).clamp_min(1e-20)).max())


def _zeros(module: nn.Module, heads: looking.Heads, mask: object, arguments: dict[str, object]) -> torch.Tensor:
    query, _, value = heads
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
