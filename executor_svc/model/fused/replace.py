"""Goes through a model and replaces what is understood: larger parts first, then what is left of smaller ones."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import structlog
import torch
from torch import nn
from transformers import PreTrainedModel

from executor_svc.model.fused import decoder_layer, gated_mlp, linear, norm, read_attention
from executor_svc.model.fused.heads import KeptFactors
from executor_svc.model.fused.observe import Seen, observe
from executor_svc.model.fused.output import GreedyHead, PackedEmbedding, understand_embedding, understand_head
from executor_svc.model.fused.pages import give_back
from executor_svc.model.fused.products import Product, Products
from executor_svc.model.fused.structure import as_linear, let_go
from executor_svc.model.fused.trial import Trial
from executor_svc.model.fused.wanted import Wanted
from executor_svc.model.progress import Progress, silent, tracked
from executor_svc.model.proof import ProvenLayer
from kernels import Backend
from kernels.cpu.linear import PackedWeight

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Fused:
    """What became of a model: how many modules of each kind were replaced; what finds the likeliest tokens of hidden
    states, None where that takes logits; and what may be told of whose hidden states are wanted, whether or not it is
    heard."""

    replaced: dict[str, int]
    greedy: GreedyHead | None
    wanted: Wanted


def fuse(
    model: PreTrainedModel,
    layers: list[ProvenLayer],
    backend: Backend,
    products: Products,
    max_model_len: int,
    progress: Progress = silent,
) -> Fused:
    """Replace what is understood. Weights go over to their replacements, one module at a time. Raises ModelRefused
    where the model is then no longer what it was.

    Leaves the model with an attention function of its own; the caller sets the one to serve with.
    """
    trial = Trial(model, layers, backend, max_model_len)
    with torch.inference_mode():
        head_rule = understand_head(model)
        fusing = _Fusing(observe(model, max_model_len), products)
        head = fusing.ends(model)
        attention = {layer.module: layer for layer in layers} if backend.attend_projected is not None else {}
        for module in tracked(progress, "packing weights", list(model.modules())):
            if module in attention:
                fusing.attention(attention[module], backend)
            else:
                fusing.mlp(module)
        for module in model.modules():
            fusing.norm(module)
            fusing.linear(module)
        for module in model.modules():
            fusing.decoder_layer(module)
    replaced = dict(fusing.replaced)
    log.info("modules_fused", products="native" if products.are_native(model.dtype) else "torch", **replaced)
    greedy = None if head is None or head_rule is None else head_rule.greedy(head)
    trial.check(greedy)
    return Fused(replaced, greedy, _last_layer_told(model, trial))


def _last_layer_told(model: PreTrainedModel, trial: Trial) -> Wanted:
    """What the model's last layer listens to, if it is understood and what follows it takes each token by itself."""
    wanted = Wanted()
    layers = [module for module in model.modules() if isinstance(vars(module).get("forward"), decoder_layer.FusedLayer)]
    if layers:
        whole: decoder_layer.FusedLayer = vars(layers[-1])["forward"]
        layers[-1].forward = replace(whole, wanted=wanted)
        if not trial.may_leave_out(wanted):
            layers[-1].forward = whole
    return wanted


class _Fusing:
    """A walk in the making."""

    def __init__(self, seen: Seen, products: Products) -> None:
        self._seen, self._products = seen, products
        self._kept_factors = KeptFactors()
        self.replaced: Counter[str] = Counter()

    def ends(self, model: PreTrainedModel) -> Product | None:
        """The output head, and the embedding with it where they share their weights."""
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if head is None or as_linear(head) is None:
            return None
        is_shared = getattr(embedding, "weight", None) is head.weight
        if is_shared:
            looks_up, scale = understand_embedding(embedding)
            users = [m for m in model.modules() if any(own is head.weight for own in m.parameters(recurse=False))]
            if not looks_up or len(users) > 2 or {head, embedding} & self._seen.read:
                return None
        elif not self._seen.is_free(head):
            return None
        product = linear.understand(head, self._seen, self._products)
        if product is None:
            return None
        if is_shared and isinstance(product.weight, PackedWeight):
            let_go(embedding)
            self._replace("embedding", embedding, PackedEmbedding(product.weight, scale))
        self._replace("linear", head, product, packed=True)
        return product

    def attention(self, layer: ProvenLayer, backend: Backend) -> None:
        fused = read_attention.understand(layer, self._seen, self._products, backend, self._kept_factors)
        self._replace("attention", layer.module, fused, packed=True)

    def mlp(self, module: nn.Module) -> None:
        self._replace("mlp", module, gated_mlp.understand(module, self._seen, self._products), packed=True)

    def norm(self, module: nn.Module) -> None:
        if self._seen.takes_one(module):
            self._replace("norm", module, norm.understand(module, self._products.level))

    def linear(self, module: nn.Module) -> None:
        if self._seen.is_free(module):
            self._replace("linear", module, linear.understand(module, self._seen, self._products), packed=True)

    def decoder_layer(self, module: nn.Module) -> None:
        self._replace("layer", module, decoder_layer.understand(module, self._seen))

    def _replace(self, kind: str, module: nn.Module, by: Callable[..., Any] | None, *, packed: bool = False) -> None:
        if by is None:
            return
        module.forward = by
        self.replaced[kind] += 1
        if packed:
            give_back(let_go(module))
