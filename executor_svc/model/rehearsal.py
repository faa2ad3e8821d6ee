"""Rehearses serving at load: two short sequences, packed and in parts, must give what the model gives by itself.

The model first computes each sequence alone, in one piece, with its own attention. Then the same tokens go through
ours over a small KV memory, both sequences side by side, in steps that hold beginnings, middles and single tokens.
Each layer's queries, keys, values and attention are compared, and the logits at the end. Whatever a model does that
serving does not know of shows here without being understood: a scale, a bias, positions of its own counting, tokens
that meet their neighbours.

Each layer hands on what the first pass attended to, so that rounding does not grow from layer to layer and a
difference is found where it arises. It costs eight forward passes of at most 22 tokens, each about as long as reading
the weights once. What begins only in longer sequences is not seen here: of that, `masks` and `own_positions` look for
what is known to occur.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from executor_svc.model import attention, looking
from executor_svc.model.looking import Heads
from executor_svc.model.proof import ProvenLayer, hidden_as_zero
from executor_svc.model.refusal import ModelRefused
from kernels import Backend, Rows

OWN_NAME, PACKED_NAME = "paged_attention_own", "paged_attention_packed"
BLOCK_SIZE = 16
# Two sequences in parts; most tokens lie neither at a sequence's nor at a step's beginning. Some have a step alone.
PARTS = ((6, 12, 1, 1, 1, 1), (2, 3, 1, 0, 0, 0))
BLOCKS = ((4, 2), (3, 1))  # so that no place is what a position is
NUM_BLOCKS = 5
# How far a token's vector may be off, as a share of its length. What our attention makes of the same queries, keys and
# values is so for every token; and with fp32 weights, or in the first layer, all that the model computes.
_ATTENTION_ALLOWED = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.08}
_ALLOWED = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.03}
# In later layers of other models rounding grows, and may send a token to another expert. It does not do that to most
# tokens, nor to all of the few that lie alike in their steps.
_ALLOWED_LATER = 0.1
_INSIDE, _FIRST, _ALONE = range(3)  # how a token lies in its step: first of a row that goes on, alone, or otherwise
_REFUSAL = (
    "the model would be served wrong: the {} differ by {:.2g} from what it computes by itself, of which {:g} may be "
    "rounding; it does something that serving does not know of"
)


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens `first : first + count` of a sequence: one row of a step."""

    sequence: int
    first: int
    count: int


def rehearse(model: PreTrainedModel, layers: list[ProvenLayer], max_model_len: int, backend: Backend) -> None:
    """Raises ModelRefused where serving would differ from what the model gives by itself.

    Leaves the model with the rehearsal's attention function; the caller sets the one to serve with.
    """
    looking.register(OWN_NAME, eager_mask)
    looking.register(PACKED_NAME)
    vocab_size, drawn = model.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
    lengths = [min(sum(parts), max_model_len) for parts in PARTS]
    sequences = [torch.randint(vocab_size, (length,), generator=drawn).to(model.device) for length in lengths]
    takes_positions = "logits_to_keep" in inspect.signature(model.forward).parameters
    try:
        own = [_Own() for _ in sequences]
        own_logits = [looking.forward(model, OWN_NAME, *pair) for pair in zip(own, sequences, strict=True)]
        packed = _Packed(layers, own, backend, model.device)
        steps = _steps(lengths)
        for parts in steps:
            packed.begin(parts)
            tokens = torch.cat([sequences[part.sequence][_span(part)] for part in parts])
            inputs: dict[str, torch.Tensor] = {"position_ids": packed.positions[None]}
            if parts is not steps[-1] and parts is steps[0]:  # as in serving where nobody samples
                looking.without_logits(model, PACKED_NAME, packed, tokens, **inputs)
                continue
            if takes_positions:  # as in serving: some models leave out tokens whose logits are not asked for
                inputs["logits_to_keep"] = torch.arange(len(tokens), device=model.device)
            logits = looking.forward(model, PACKED_NAME, packed, tokens, **inputs)
            packed.compare("logits", logits, torch.cat([own_logits[part.sequence][_span(part)] for part in parts]))
    except ModelRefused:
        raise
    except Exception as error:
        # Whatever the model's own code raises means the same.
        raise ModelRefused(
            f"{type(model).__name__} does not run as it would be served: {type(error).__name__}: {error}"
        ) from error
    packed.check(model)


def _steps(lengths: list[int]) -> list[list[_Part]]:
    steps, done = [], [0] * len(lengths)
    for counts in zip(*PARTS, strict=True):
        parts = [_Part(i, done[i], min(count, lengths[i] - done[i])) for i, count in enumerate(counts)]
        done = [part.first + part.count for part in parts]
        steps.append([part for part in parts if part.count])
    return [parts for parts in steps if parts]


def _span(part: _Part) -> slice:
    return slice(part.first, part.first + part.count)


class _Own:
    """A sequence alone, in one piece, with the model's own attention: keeps what each layer computed."""

    def __init__(self) -> None:
        self.heads: dict[torch.nn.Module, Heads] = {}
        self.attended: dict[torch.nn.Module, torch.Tensor] = {}

    def __call__(self, module: torch.nn.Module, heads: Heads, mask: object, arguments: dict[str, Any]) -> torch.Tensor:
        # The eager function of the file that the layer's code is from: what it runs when it is told no other.
        code = inspect.unwrap(type(module).forward)
        eager = code.__globals__.get("eager_attention_forward") or AttentionInterface()["sdpa"]
        self.heads[module] = heads
        # In fp32, as ours works inside: scores of hundreds, as Qwen 2's biased keys give, are too coarse in 16 bits.
        if isinstance(mask, torch.Tensor) and mask.is_floating_point():
            mask = mask.float()
        attended, _ = eager(module, *(tensor.float() for tensor in heads), mask, **arguments)
        self.attended[module] = attended.to(heads[0].dtype)
        return self.attended[module]


class _Packed:
    """The steps of all sequences together with our attention. Compares, and hands on what it should have computed."""

    def __init__(self, layers: list[ProvenLayer], own: list[_Own], backend: Backend, device: torch.device) -> None:
        self._device = device
        self._own, self._current = own, attention.CurrentStep()
        self._parts: list[_Part] = []
        self._lie = torch.empty(0)
        self._errors: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # with how each token lies
        self._order = {layer.module: number for number, layer in enumerate(layers)}
        self._layers = {layer.module: _scratch(layer, backend, self._current, device) for layer in layers}

    def begin(self, parts: list[_Part]) -> None:
        device = self._device
        positions = [torch.arange(part.first, part.first + part.count, device=device) for part in parts]
        tables = torch.tensor([BLOCKS[part.sequence] for part in parts], dtype=torch.int32, device=device)
        slots = [
            table[at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE
            for table, at in zip(tables, positions, strict=True)
        ]
        starts, contexts = [0], []
        for part in parts:
            starts.append(starts[-1] + part.count)
            contexts.append(part.first + part.count)
        self.positions = torch.cat(positions)
        self._parts = parts
        lie = [_FIRST if part.first and not i else _INSIDE for part in parts for i in range(part.count)]
        self._lie = torch.tensor([_ALONE] if len(lie) == 1 else lie, device=device)
        self._current.tensors = attention.StepTensors(
            torch.cat(slots),
            Rows(
                block_tables=tables,
                query_start=torch.tensor(starts, dtype=torch.int32, device=device),
                context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
            ),
        )

    def __call__(self, module: torch.nn.Module, heads: Heads, mask: object, arguments: dict[str, Any]) -> torch.Tensor:
        layer = self._layers[module]
        where = f"of layer {self._order[module]} ({type(module).__name__})"
        own = [
            torch.cat([self._own[part.sequence].heads[module][i][:, :, _span(part)] for part in self._parts], 2)
            for i in range(len(heads))
        ]
        for name, served, right in zip(("queries", "keys", "values"), heads, own, strict=True):
            self.compare(f"{name} {where}", served[0].transpose(0, 1), right[0].transpose(0, 1))
        attended = torch.cat([self._own[part.sequence].attended[module][:, _span(part)] for part in self._parts], 1)
        # Of the right heads, so that what went before does not matter here.
        error = _off(attention.attend_with(layer, own[0], own[1], own[2], **arguments)[0], attended[0]).amax()
        if not error <= (allowed := _ATTENTION_ALLOWED[heads[0].dtype]):  # NaN counts as more
            raise ModelRefused(_REFUSAL.format(f"attention {where}", error, allowed))
        return attended

    def compare(self, name: str, served: torch.Tensor, own: torch.Tensor) -> None:
        """Both `[tokens, ...]`."""
        self._errors.setdefault(name, []).append((_off(served, own), self._lie))

    def check(self, model: PreTrainedModel) -> None:
        exact = model.dtype == torch.float32 and getattr(model.config, "quantization_config", None) is None
        dtype = model.dtype if exact or model.dtype != torch.float32 else torch.bfloat16
        for name, compared in self._errors.items():
            errors, lie = (torch.cat(parts) for parts in zip(*compared, strict=True))
            if exact or "of layer 0 " in name:
                error, allowed = errors.amax(), _ALLOWED[dtype]
            else:
                alike = [errors[lie == kind] for kind in (_FIRST, _ALONE)]
                most = [errors.median(), *(few.amin() for few in alike if len(few))]
                error, allowed = torch.stack(most).amax(), _ALLOWED_LATER
            if not error <= allowed:
                raise ModelRefused(_REFUSAL.format(name, error, allowed))


def _off(served: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """How far each token's vector is off, `[tokens]`."""
    served, own = hidden_as_zero(served), hidden_as_zero(own)
    served, own = served.float().flatten(1), own.float().flatten(1)
    length = own.norm(dim=1)
    return (served - own).norm(dim=1) / (length + 1e-3 * length.amax() + 1e-30)


def _scratch(
    layer: ProvenLayer, backend: Backend, current: attention.CurrentStep, device: torch.device
) -> attention.PagedLayer:
    heads = (layer.num_kv_heads, layer.key_dim, layer.value_dim)
    keys, values = backend.allocate_caches(NUM_BLOCKS, BLOCK_SIZE, *heads, layer.dtype, device)
    return attention.PagedLayer(backend, keys.fill_(torch.nan), values.fill_(torch.nan), current, layer.window)
