"""Finds out what an attention layer computes, by comparing with what it hands to its attention function."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from executor_svc.model import looking
from executor_svc.model.attention import CurrentStep, PagedLayer, StepTensors, attach, attend_with, detach
from executor_svc.model.fused import make_attention, norm
from executor_svc.model.fused.agreement import agrees, given, in_fp32, is_as_good, made_up_rows, values_in_fp32
from executor_svc.model.fused.attention import FusedAttention, NormReading, Reading
from executor_svc.model.fused.heads import HeadCounts, KeptFactors, Rotation, Turns, rotations
from executor_svc.model.fused.observe import NUM_TOKENS, Seen
from executor_svc.model.fused.products import Products
from executor_svc.model.fused.structure import Linear, as_linear, holds_only, is_plain, is_untouched
from executor_svc.model.looking import Heads
from executor_svc.model.proof import ProvenLayer
from kernels import Backend, Rows

_TURNS = "position_embeddings"
_BLOCK_SIZE = 16  # more than NUM_TOKENS


@dataclass(frozen=True, slots=True)
class _Way:
    """Which of a layer's linear children and norms (by number) do what; `grouped` as in `Reading`."""

    qkv: tuple[int, ...]
    output: int
    grouped: bool
    norms: tuple[int, int] | None
    rotation: Rotation | None


@dataclass(frozen=True, slots=True)
class _Children:
    linears: list[Linear]
    norms: list[norm.RMSNorm]
    norm_names: list[str]

    @classmethod
    def of(cls, module: nn.Module, level: str) -> "_Children | None":
        """None if the module has children with weights of another kind."""
        linears, rms_norms, names = [], [], []
        for name, child in module.named_children():
            if (linear := as_linear(child)) is not None:
                linears.append(linear)
            elif (rms_norm := norm.understand(child, level)) is not None:
                rms_norms.append(rms_norm)
                names.append(name)
            elif any(True for _ in child.parameters()):
                return None
        return cls(linears, rms_norms, names) if len(linears) in (2, 4) and len(rms_norms) in (0, 2) else None

    def norms_of(self, way: _Way) -> tuple[NormReading, NormReading] | None:
        if way.norms is None:
            return None
        query, key = (NormReading(self.norm_names[i], self.norms[i].eps, self.norms[i].plus_one) for i in way.norms)
        return query, key


def understand(
    layer: ProvenLayer, seen: Seen, products: Products, backend: Backend, kept_factors: KeptFactors
) -> FusedAttention | None:
    """What an attention layer computes; None if that is not understood. Its weights stay in it."""
    module, arguments = layer.module, seen.attention.get(layer.module)
    if arguments is None or not is_untouched(module) or not seen.is_free(module):
        return None
    if not seen.takes_only(module, "hidden_states", _TURNS):
        return None
    children = _Children.of(module, products.level)
    sinks = _sinks(module, arguments.get("s_aux"))
    if children is None or (sinks is None and arguments.get("s_aux") is not None):
        return None
    if not holds_only(module, list(module.children()), own=[] if sinks is None else [module.get_parameter(sinks)]):
        return None
    exact_module, inputs = in_fp32(module), seen.inputs[module]
    width = children.linears[0].shape[1]
    witness = given(lambda: _Witness(exact_module, width, inputs))
    exact_children = _Children.of(exact_module, products.level)
    if witness is None or exact_children is None:
        return None
    way = next(_ways(exact_children, witness), None)
    if way is None:
        return None
    scale = _scale(arguments.get("scaling"), witness.counts)
    reading = Reading(
        counts=witness.counts,
        qkv=way.qkv,
        output=way.output,
        grouped=way.grouped,
        norms=children.norms_of(way),
        rotation=way.rotation,
        scale=scale,
        soft_cap=arguments.get("softcap"),
        sinks=sinks,
        num_results=witness.num_results,
    )
    fused = make_attention.build(layer, reading, products, kept_factors)
    made, own, exact = _attended(fused, layer, exact_module, inputs, backend)
    return fused if is_as_good(made, own, exact, products.rounding) else None


def _sinks(module: nn.Module, passed: object) -> str | None:
    """The name of the module's own parameter that it passes on."""
    own = [name for name, parameter in module.named_parameters(recurse=False) if parameter is passed]
    return own[0] if own and is_plain(passed) else None


def _scale(passed: object, counts: HeadCounts) -> float:
    return float(passed) if isinstance(passed, int | float) else counts.dim**-0.5


class _Witness:
    """A layer in fp32, and what it makes of some tokens: `heads` for its attention function, and `result` of random
    vectors, `attended`, that this returned."""

    def __init__(self, exact_module: nn.Module, width: int, inputs: dict[str, Any]) -> None:
        self.hidden = made_up_rows(NUM_TOKENS, width, torch.float32)[None]
        self.turns: Turns | None = values_in_fp32(inputs.get(_TURNS))
        self.heads: Heads = (torch.empty(0), torch.empty(0), torch.empty(0))
        self.attended = torch.empty(0)
        made = _call(exact_module, self._attend, self.hidden, inputs)
        self.num_results = len(made) if isinstance(made, tuple) else 0
        self.result = _first(made)
        self.counts = HeadCounts.of(self.heads)

    def _attend(self, module: nn.Module, heads: Heads, mask: object, arguments: dict[str, Any]) -> torch.Tensor:
        self.heads, (query, _, value) = heads, heads
        generator = torch.Generator().manual_seed(0)
        self.attended = torch.randn(1, query.shape[2], query.shape[1], value.shape[3], generator=generator)
        return self.attended


def _call(module: nn.Module, look: looking.Look, hidden: torch.Tensor, inputs: dict[str, Any]) -> Any:
    """The layer's own `forward`, with other hidden states than it was seen to be called with."""
    inputs = inputs if hidden.dtype != torch.float32 else values_in_fp32(inputs)
    with looking.at(module, look), torch.inference_mode():
        return type(module).forward(module, **inputs | {"hidden_states": hidden})


def _ways(children: _Children, witness: _Witness) -> Iterator[_Way]:
    """Ways to read the layer that give what it gives."""
    for output, linear in enumerate(children.linears):
        if linear.shape[1] != witness.attended[0, 0].numel():
            continue
        if not agrees(functional.linear(witness.attended.flatten(2), linear.weight, linear.bias), witness.result):
            continue
        others = [i for i in range(len(children.linears)) if i != output]
        for qkv in itertools.permutations(others):
            for grouped in [False] if len(qkv) == 3 else [False, True]:
                yield from _head_ways(children, witness, qkv, output, grouped=grouped)


def _head_ways(
    children: _Children, witness: _Witness, qkv: tuple[int, ...], output: int, *, grouped: bool
) -> Iterator[_Way]:
    counts = witness.counts
    raw = torch.cat(
        [functional.linear(witness.hidden[0], children.linears[i].weight, children.linears[i].bias) for i in qkv],
        dim=-1,
    )
    if raw.shape[-1] != sum(counts.sizes):
        return
    if (order := make_attention.order(counts, grouped=grouped)) is not None:
        raw = raw[:, order]
    wanted = [heads[0].transpose(0, 1) for heads in witness.heads]
    if not agrees(raw.unflatten(-1, (-1, counts.dim))[:, -counts.keys :], wanted[2]):  # values are what they were
        return
    for norms in [None] if not children.norms else [(0, 1), (1, 0)]:
        if norms is not None and not _fit(children.norms[0], children.norms[1], counts.dim):
            continue
        for rotation in rotations(witness.turns, counts.dim):
            own = None if norms is None else (children.norms[norms[0]], children.norms[norms[1]])
            factors: Turns | tuple[None, None] = (None, None)
            if rotation is not None and witness.turns is not None:
                factors = rotation.factors(witness.turns)
            heads = make_attention.projection(counts, own, rotation).heads(raw, *factors)
            if all(agrees(*pair) for pair in zip(heads, wanted, strict=True)):
                yield _Way(qkv, output, grouped, norms, rotation)


def _fit(one: norm.RMSNorm, other: norm.RMSNorm, dim: int) -> bool:
    """Whether two norms are of one head each, and alike but for their weights."""
    alike = (one.eps, one.plus_one) == (other.eps, other.plus_one)
    return alike and len(one.weight) == len(other.weight) == dim


def _attended(
    fused: FusedAttention, layer: ProvenLayer, exact_module: nn.Module, inputs: dict[str, Any], backend: Backend
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One step of one row through small caches, as replaced, by the layer itself, and by that in fp32."""
    current = CurrentStep()
    current.tensors = StepTensors(
        torch.arange(_BLOCK_SIZE, _BLOCK_SIZE + NUM_TOKENS),
        Rows(
            block_tables=torch.ones(1, 1, dtype=torch.int32),
            query_start=torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
            context_lens=torch.tensor([NUM_TOKENS], dtype=torch.int32),
        ),
    )

    def paged(dtype: torch.dtype) -> PagedLayer:
        keys, values = backend.allocate_caches(
            2, _BLOCK_SIZE, layer.num_kv_heads, layer.key_dim, layer.value_dim, dtype, torch.device("cpu")
        )
        return PagedLayer(backend, keys, values, current, layer.window)

    def attended_by(paged_layer: PagedLayer) -> looking.Look:
        return lambda module, heads, mask, arguments: attend_with(paged_layer, *heads, **arguments)

    hidden = made_up_rows(NUM_TOKENS, inputs["hidden_states"].shape[-1], layer.dtype, scales=(1.0,))[None]
    exact = _first(_call(exact_module, attended_by(paged(torch.float32)), hidden.float(), inputs))
    own = _first(_call(layer.module, attended_by(paged(layer.dtype)), hidden, inputs))
    attach(layer.module, paged(layer.dtype))
    try:
        with torch.inference_mode():
            made = _first(fused(**inputs | {"hidden_states": hidden}))
    finally:
        detach(layer.module)
    return made, own, exact


def _first(made: Any) -> torch.Tensor:
    """Raises TypeError where a layer gives something else than hidden states, or a tuple that begins with them."""
    result = made[0] if isinstance(made, tuple) else made
    if not isinstance(result, torch.Tensor):
        raise TypeError(f"a layer gives {type(result).__name__}")
    return result
