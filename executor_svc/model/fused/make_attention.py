"""Makes what stands for an attention layer, of what is known of it."""

import torch
from torch import nn

from executor_svc.model.fused import norm
from executor_svc.model.fused.attention import FusedAttention, NormReading, Reading
from executor_svc.model.fused.heads import HeadCounts, KeptFactors, Rotation, merged_orders
from executor_svc.model.fused.products import Product, Products
from executor_svc.model.fused.structure import Linear, as_linear
from executor_svc.model.proof import ProvenLayer
from kernels import Projection, Rule


def build(layer: ProvenLayer, reading: Reading, products: Products, kept_factors: KeptFactors) -> FusedAttention:
    """What `layer` computes, read as `reading`; its weights stay in it. Raises IndexError or AttributeError where it
    has no such children."""
    module = layer.module
    linears = linear_children(module)
    norms = None
    if reading.norms is not None:
        query, key = (_norm(module, own, products.level) for own in reading.norms)
        norms = query, key
    sinks = None if reading.sinks is None else module.get_parameter(reading.sinks)
    return FusedAttention(
        module=module,
        reading=reading,
        qkv=_merged(linears, reading, products),
        output=products.of(linears[reading.output]),
        projection=projection(reading.counts, norms, reading.rotation),
        kept_factors=kept_factors,
        rule=Rule(reading.scale, layer.window, reading.soft_cap, sinks),
    )


def linear_children(module: nn.Module) -> list[Linear]:
    """A reading's numbers are of these."""
    return [linear for child in module.children() if (linear := as_linear(child)) is not None]


def projection(
    counts: HeadCounts, norms: tuple[norm.RMSNorm, norm.RMSNorm] | None, rotation: Rotation | None
) -> Projection:
    """norms: of queries and of keys."""
    sizes = counts.queries, counts.keys, counts.dim
    rotary = "half" if rotation is None else rotation.style
    if norms is None:
        return Projection(*sizes, rotary=rotary)
    query, key = norms
    return Projection(*sizes, query_norm=query.factors, key_norm=key.factors, norm_eps=query.eps, rotary=rotary)


def order(counts: HeadCounts, *, grouped: bool) -> torch.Tensor | None:
    """The one of `merged_orders` that this names."""
    return list(merged_orders(counts))[int(grouped)]


def _norm(module: nn.Module, reading: NormReading, level: str) -> norm.RMSNorm:
    return norm.build(module.get_submodule(reading.child), reading.eps, plus_one=reading.plus_one, level=level)


def _merged(children: list[Linear], reading: Reading, products: Products) -> Product:
    linears = [children[i] for i in reading.qkv]
    bias = None
    if any(linear.bias is not None for linear in linears):
        bias = torch.cat(
            [
                linear.weight.new_zeros(linear.shape[0]) if linear.bias is None else linear.bias.detach()
                for linear in linears
            ]
        )
    weights = [linear.weight for linear in linears]
    if (outputs := order(reading.counts, grouped=reading.grouped)) is not None:
        weights = [weights[0][outputs]]
        bias = None if bias is None else bias[outputs]
    return products.make(weights, bias)
