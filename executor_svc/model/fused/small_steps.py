"""A few steps of a model through small caches, as it would be served."""

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from executor_svc.model import attention
from executor_svc.model.fused.output import GreedyHead
from executor_svc.model.fused.wanted import Wanted
from executor_svc.model.proof import ProvenLayer, hidden_as_zero
from kernels import Backend, Rows

_BLOCK_SIZE = 16
_COUNTS = ((9, 4), (1, 3), (1, 1))  # tokens of two sequences in each step
_SOME = (4, 12)  # of the first step's tokens


class SmallSteps:
    """The steps of one model, before or after its modules were replaced."""

    def __init__(self, model: PreTrainedModel, layers: list[ProvenLayer], backend: Backend, max_model_len: int) -> None:
        self._model, self._layers, self._backend = model, layers, backend
        self._longest = max_model_len

    @torch.inference_mode()
    def run(self, greedy: GreedyHead | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of all tokens, and the likeliest ids by `greedy`."""
        logits, found = [], []
        with self._attached() as current:
            for inputs in self._steps(current):
                logits.append(hidden_as_zero(self._model(**inputs).logits[0]))
                if greedy is not None:
                    hidden = self._model.base_model(**inputs).last_hidden_state[0]
                    found.append(greedy(hidden, logits[-1].shape[-1]))
        return torch.cat(logits), torch.cat(found) if found else torch.empty(0, dtype=torch.int64)

    @torch.inference_mode()
    def last_hidden(self, wanted: Wanted) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The first step's last hidden states: of some tokens as `run` computes them, and of the same where the model
        is told that others are not wanted; None where no layer hears of it."""
        tokens = torch.tensor(_SOME)
        with self._attached() as current:
            inputs = next(self._steps(current))
            whole = self._model.base_model(**inputs).last_hidden_state[0]
            with wanted.only(tokens):
                some = self._model.base_model(**inputs).last_hidden_state[0]
                heard = wanted.heard
        return whole.index_select(0, tokens), some if heard else None

    def digest(self, greedy: GreedyHead | None, wanted: Wanted | None) -> str:
        """Of all that the model computes in these steps, to the bit; with `wanted` where it has a layer that hears."""
        made = [*self.run(greedy)]
        if wanted is not None:
            made += [part for part in self.last_hidden(wanted) if part is not None]
        digest = hashlib.sha256()
        for part in made:
            digest.update(f"{part.dtype} {list(part.shape)}\0".encode())
            digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

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
