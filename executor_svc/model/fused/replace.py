"""Goes through a model and replaces what is understood: larger parts first, then what is left of smaller ones."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog
import torch
from torch import nn
from transformers import PreTrainedModel

from executor_svc.model.fused import decoder_layer, gated_mlp, linear, norm, read_attention
from executor_svc.model.fused.heads import KeptFactors
from executor_svc.model.fused.observe import Seen, observe
from executor_svc.model.fused.output import (
    GreedyHead,
    HeadRule,
    PackedEmbedding,
    understand_embedding,
    understand_head,
)
from executor_svc.model.fused.products import Product, Products
from executor_svc.model.fused.recipe import Rebuilding, Replaced, Replacement, Replacing
from executor_svc.model.fused.small_steps import SmallSteps
from executor_svc.model.fused.structure import as_linear
from executor_svc.model.fused.trial import Trial
from executor_svc.model.fused.wanted import Wanted
from executor_svc.model.progress import Progress, silent, tracked
from executor_svc.model.proof import ProvenLayer
from kernels import Backend
from kernels.cpu.linear import PackedWeight

log = structlog.get_logger(__name__)


PACKING = "packing weights"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a model came to what `Fused` tells of it: in plain values, but for what it computes. `head`: None where
    nothing finds the likeliest tokens without logits. `told`: whether the last layer listens to `Wanted`. `digest`: of
    what the model then computes in some small steps."""

    replaced: list[Replaced]
    head: HeadRule | None
    told: bool
    digest: str


@dataclass(frozen=True, slots=True)
class Fused:
    """What became of a model: how many modules of each kind were replaced; what finds the likeliest tokens of hidden
    states, None where that takes logits; what may be told of whose hidden states are wanted, whether or not it is
    heard; and how to do it again."""

    replaced: dict[str, int]
    greedy: GreedyHead | None
    wanted: Wanted
    recipe: Recipe


class OtherResults(Exception):
    """A model that was replaced by a recipe computes something else than the one that the recipe is of."""


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
    steps = SmallSteps(model, layers, backend, max_model_len)
    trial = Trial(model, steps)
    with torch.inference_mode():
        head_rule = understand_head(model)
        fusing = _Fusing(model, observe(model, max_model_len), products)
        head = fusing.ends(model)
        attention = {layer.module: layer for layer in layers} if backend.attend_projected is not None else {}
        for module in tracked(progress, PACKING, list(model.modules())):
            if module in attention:
                fusing.attention(attention[module], backend)
            else:
                fusing.mlp(module)
        for module in model.modules():
            fusing.norm(module)
            fusing.linear(module)
        for module in model.modules():
            fusing.decoder_layer(module)
    replaced = fusing.replacing.counts
    log.info("modules_fused", products="native" if products.are_native(model.dtype) else "torch", **replaced)
    greedy = None if head is None or head_rule is None else head_rule.greedy(head)
    trial.check(greedy)
    wanted = Wanted()
    told = _tell_last_layer(model, wanted, lambda: trial.may_leave_out(wanted))
    digest = steps.digest(greedy, wanted if told else None)
    recipe = Recipe(fusing.replacing.recipe, None if greedy is None else head_rule, told, digest)
    return Fused(replaced, greedy, wanted, recipe)


def fuse_again(
    model: PreTrainedModel,
    layers: list[ProvenLayer],
    backend: Backend,
    products: Products,
    max_model_len: int,
    recipe: Recipe,
    progress: Progress = silent,
) -> Fused:
    """Replace what was replaced before in the same model, in the same way, without finding out why.

    Raises OtherResults where it then computes something else than it did, to the bit, and whatever looking for a
    module raises that is not there; the model is then of no use. Leaves it as `fuse` does.
    """
    replacing, rebuilding = Replacing(model), Rebuilding(model, layers, products)
    with torch.inference_mode():
        for done in tracked(progress, PACKING, recipe.replaced):
            module = model.get_submodule(done.module)
            replacing.replace(done.kind, module, rebuilding.build(done.kind, module, done.values))
    log.info("modules_fused", again=True, **replacing.counts)
    greedy = None
    if recipe.head is not None:
        greedy = recipe.head.greedy(vars(model.get_output_embeddings())["forward"])
    wanted = Wanted()
    if recipe.told and not _tell_last_layer(model, wanted, lambda: True):
        raise OtherResults("no last layer listens")
    digest = SmallSteps(model, layers, backend, max_model_len).digest(greedy, wanted if recipe.told else None)
    if digest != recipe.digest:
        raise OtherResults("what it computes in some small steps is not what it was")
    return Fused(replacing.counts, greedy, wanted, recipe)


def _tell_last_layer(model: PreTrainedModel, wanted: Wanted, may_be_told: Callable[[], bool]) -> bool:
    """Have the model's last layer listen to `wanted`, if it is understood and what follows it takes each token by
    itself: which is asked while it listens. Returns whether it does."""
    layers = [module for module in model.modules() if isinstance(vars(module).get("forward"), decoder_layer.FusedLayer)]
    if not layers:
        return False
    whole: decoder_layer.FusedLayer = vars(layers[-1])["forward"]
    layers[-1].forward = replace(whole, wanted=wanted)
    if not may_be_told():
        layers[-1].forward = whole
        return False
    return True


class _Fusing:
    """A walk in the making."""

    def __init__(self, model: PreTrainedModel, seen: Seen, products: Products) -> None:
        self._seen, self._products = seen, products
        self._kept_factors = KeptFactors()
        self.replacing = Replacing(model)

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
        self._replace("linear", head, product)
        if is_shared and isinstance(product.weight, PackedWeight):
            self._replace("embedding", embedding, PackedEmbedding(product.weight, scale))
        return product

    def attention(self, layer: ProvenLayer, backend: Backend) -> None:
        fused = read_attention.understand(layer, self._seen, self._products, backend, self._kept_factors)
        self._replace("attention", layer.module, fused)

    def mlp(self, module: nn.Module) -> None:
        self._replace("mlp", module, gated_mlp.understand(module, self._seen, self._products))

    def norm(self, module: nn.Module) -> None:
        if self._seen.takes_one(module):
            self._replace("norm", module, norm.understand(module, self._products.level))

    def linear(self, module: nn.Module) -> None:
        if self._seen.is_free(module):
            self._replace("linear", module, linear.understand(module, self._seen, self._products))

    def decoder_layer(self, module: nn.Module) -> None:
        self._replace("layer", module, decoder_layer.understand(module, self._seen))

    def _replace(self, kind: str, module: nn.Module, by: Replacement | None) -> None:
        if by is not None:
            self.replacing.replace(kind, module, by)
