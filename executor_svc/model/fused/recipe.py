"""What became of a model's modules, in plain values: enough to replace them again without finding anything out."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from executor_svc.model.fused import decoder_layer, gated_mlp, make_attention, norm
from executor_svc.model.fused.attention import FusedAttention, NormReading, Reading
from executor_svc.model.fused.decoder_layer import FusedLayer, Order
from executor_svc.model.fused.gated_mlp import GatedMLP
from executor_svc.model.fused.heads import HeadCounts, KeptFactors, Rotation
from executor_svc.model.fused.norm import RMSNorm
from executor_svc.model.fused.output import PackedEmbedding
from executor_svc.model.fused.pages import give_back
from executor_svc.model.fused.products import Product, Products
from executor_svc.model.fused.structure import as_linear, let_go
from executor_svc.model.proof import ProvenLayer
from kernels.cpu.linear import PackedWeight

Replacement = Callable[..., Any]
_PACKED = {"linear", "attention", "mlp"}  # kinds that have taken over the weights of their modules


@dataclass(frozen=True, slots=True)
class Replaced:
    """One module: by what kind, and what is to be known for that."""

    kind: str
    module: str
    values: dict[str, Any]


class Replacing:
    """Replaces modules of one model, and keeps what was done."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._done: list[tuple[str, nn.Module]] = []

    def replace(self, kind: str, module: nn.Module, by: Replacement) -> None:
        module.forward = by
        self._done.append((kind, module))
        if kind in _PACKED:
            give_back(let_go(module))
        elif kind == "embedding":
            let_go(module)

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(kind for kind, _ in self._done))

    @property
    def recipe(self) -> list[Replaced]:
        """In the order in which it was done."""
        return [Replaced(kind, self._names[module], _values(vars(module)["forward"])) for kind, module in self._done]


class Rebuilding:
    """Makes replacements of a model's modules again, in the order of their recipe."""

    def __init__(self, model: PreTrainedModel, layers: list[ProvenLayer], products: Products) -> None:
        self._model, self._products = model, products
        self._layers = {layer.module: layer for layer in layers}
        self._kept_factors = KeptFactors()

    def build(self, kind: str, module: nn.Module, values: dict[str, Any]) -> Replacement:
        """Raises what follows where `module` is not what the recipe was made for: ValueError, and whatever else looking
        for its parts raises."""
        if kind == "attention":
            return make_attention.build(self._layers[module], _reading(values), self._products, self._kept_factors)
        if kind == "mlp":
            return gated_mlp.build(module, self._products, values["reading"])
        if kind == "norm":
            return norm.build(module, values["eps"], plus_one=values["plus_one"], level=self._products.level)
        if kind == "layer":
            return decoder_layer.build(module, Order(**values["order"]), values["num_results"])
        if kind == "linear" and (linear := as_linear(module)) is not None:
            return self._products.of(linear)
        if kind == "embedding":
            return self._embedding(module, values["scale"])
        raise ValueError(f"{kind} is no kind of replacement for {type(module).__name__}")

    def _embedding(self, module: nn.Module, scale: float | None) -> PackedEmbedding:
        head = vars(self._model.get_output_embeddings())["forward"].weight
        if not isinstance(head, PackedWeight):
            raise ValueError("the head, whose weights the embedding has, is not packed")
        dtype = module.get_parameter("weight").dtype
        return PackedEmbedding(head, None if scale is None else torch.tensor(scale, dtype=dtype))


def _values(by: Replacement) -> dict[str, Any]:
    if isinstance(by, FusedAttention):
        return asdict(by.reading)
    if isinstance(by, GatedMLP):
        return {"reading": by.reading}
    if isinstance(by, RMSNorm):
        return {"eps": by.eps, "plus_one": by.plus_one}
    if isinstance(by, FusedLayer):
        return {"order": asdict(by.order), "num_results": by.num_results}
    if isinstance(by, PackedEmbedding):
        return {"scale": None if by.scale is None else by.scale.item()}
    if isinstance(by, Product):
        return {}
    raise TypeError(f"{type(by).__name__} is no replacement that can be made again")


def _reading(values: dict[str, Any]) -> Reading:
    norms = None
    if values["norms"] is not None:
        query, key = (NormReading(**own) for own in values["norms"])
        norms = query, key
    return Reading(
        **values
        | {
            "counts": HeadCounts(**values["counts"]),
            "qkv": tuple(values["qkv"]),
            "norms": norms,
            "rotation": None if values["rotation"] is None else Rotation(**values["rotation"]),
        }
    )
