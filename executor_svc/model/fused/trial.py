"""A few steps through small caches, before and after modules were replaced: logits must stay what they were.

Each replacement has been proved by itself; this is about what lies between them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from executor_svc.model import attention
from executor_svc.model.fused.agreement import EXACT, ROUNDING, error, given
from executor_svc.model.fused.output import GreedyHead
from executor_svc.model.fused.wanted import Wanted
from executor_svc.model.proof import ProvenLayer, hidden_as_zero
from executor_svc.model.refusal import ModelRefused, reason
from kernels import Backend, Rows

_BLOCK_SIZE = 16
_COUNTS = ((9, 4), (1, 3), (1, 1))  # tokens of two sequences in each step
# Relative; and where values are rounded to 16 bits or less, for half of the tokens: rounding may send one to another
# expert, and grows from layer to layer. A fault is as large as the logits.
_ALLOWED, _ALLOWED_ROUNDED = 1e-3, 0.3


class Trial:
    """The steps of one model. Must be made before its modules are replaced."""

    def __init__(self, model: PreTrainedModel, layers: list[ProvenLayer], backend: Backend, max_model_len: int) -> None:
        self._model, self._layers, self._backend = model, layers, backend
        self._longest = max_model_len
        self._own, _ = self._run()

    def check(self, greedy: GreedyHead | None) -> None:
        """Raises ModelRefused where logits are others now, or `greedy` finds other tokens than they do."""
        name, model = type(self._model).__name__, self._model
        try:
            logits, found = self._run(greedy)
        except Exception as raised:  # whatever the model's own code raises, of what it misses now
            raise ModelRefused(
                f"{name} does not run with modules replaced ({reason(raised)}); set fused_modules to false"
            ) from raised
        off = [error(new, old) for new, old in zip(logits, self._own, strict=True)]
        is_exact = model.dtype == torch.float32 and getattr(model.config, "quantization_config", None) is None
        difference = max(off) if is_exact else sorted(off)[len(off) // 2]
        if not difference <= (_ALLOWED if is_exact else _ALLOWED_ROUNDED):
            raise ModelRefused(
                f"{name} with modules replaced gives logits that differ by {difference:.2g} from its own; "
                "set fused_modules to false"
            )
        for row, token in zip(logits, found, strict=greedy is not None):
            if not row[token] >= row.max() - row.abs().max() * torch.finfo(model.dtype).eps:
                raise ModelRefused(f"{name} has likelier tokens than its greedy head finds; set fused_modules to false")

    @torch.inference_mode()
    def may_leave_out(self, wanted: Wanted) -> bool:
        """Whether the last hidden states of some of a step's tokens stay what they are where its last layer leaves the
        others out."""
        tokens = torch.tensor([4, 12])
        with self._attached() as current:
            inputs = next(self._steps(current))

            def hidden() -> torch.Tensor:
                return self._model.base_model(**inputs).last_hidden_state[0]

            whole = given(hidden)
            with wanted.only(tokens):
                some = given(hidden)
                heard = wanted.heard
        if whole is None or some is None or not heard:
            return False
        return error(some, whole.index_select(0, tokens)) <= (EXACT if whole.dtype == torch.float32 else ROUNDING)

    @torch.inference_mode()
    def _run(self, greedy: GreedyHead | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of all tokens, and the likeliest ids by `greedy`."""
        logits, found = [], []
        with self._attached() as current:
            for inputs in self._steps(current):
                logits.append(hidden_as_zero(self._model(**inputs).logits[0]))
                if greedy is not None:
                    hidden = self._model.base_model(**inputs).last_hidden_state[0]
                    found.append(greedy(hidden, logits[-1].shape[-1]))
        return torch.cat(logits), torch.cat(found) if found else torch.empty(0, dtype=torch.int64)

    @contextlib.contextmanager
    def _attached(self) -> Iterator[attention.CurrentStep]:
        """The model's layers on small caches of their own, and the step that they read."""
        model, current = self._model, attention.CurrentStep()
        attention.register()
        model.set_attn_implementation(attention.ATTENTION_NAME)
        for layer in self._layers:
            keys, values = self._backend.allocate_caches(
                3, _BLOCK_SIZE, layer.num_kv_heads, layer.key_dim, layer.value_dim, layer.dtype, model.device
            )
            attention.attach(layer.module, attention.PagedLayer(self._backend, keys, values, current, layer.window))
        yield current
        for layer in self._layers:
            attention.detach(layer.module)

    def _steps(self, current: attention.CurrentStep) -> Iterator[dict[str, Any]]:
        """What the model is given in each step, while `current` is that step."""
        vocab_size, done = self._model.config.get_text_config().vocab_size, [0, 0]
        for counts in _COUNTS:
            positions = [torch.arange(n, n + count) for n, count in zip(done, counts, strict=True)]
            done = [n + count for n, count in zip(done, counts, strict=True)]
            current.tensors = attention.StepTensors(
                torch.cat([(row + 1) * _BLOCK_SIZE + own for row, own in enumerate(positions)]),
                Rows(
                    block_tables=torch.tensor([[1], [2]], dtype=torch.int32),
                    query_start=torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32),
                    context_lens=torch.tensor(done, dtype=torch.int32),
                ),
            )
            ids = torch.cat([(17 * own + 5 * row + 3) % vocab_size for row, own in enumerate(positions)])
            yield {
                "input_ids": ids[None],
                "position_ids": torch.cat(positions)[None].clamp_max(self._longest - 1),
                "use_cache": False,
            }
