"""The model's forward pass over a step's tokens, given as columns on the device. Nothing here waits for the device."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from executor_svc.model.attention import CurrentStep
from executor_svc.model.fused import Wanted
from executor_svc.model.rotary import LongTokens
from executor_svc.model.step_columns import step_tensors

Columns = Mapping[str, torch.Tensor]
Head = Callable[[torch.Tensor], torch.Tensor]
"""Of some of a step's tokens, int64 `[n]`, the logits `[n, head's width]`."""


class Forward:
    """A model whose attention layers read `current`, whose rotary modules read `long_tokens`, and whose last layer may
    listen to `wanted`; and of each row the token that it sampled last."""

    def __init__(
        self,
        model: PreTrainedModel,
        current: CurrentStep,
        long_tokens: LongTokens,
        max_rows: int,
        wanted: Wanted | None = None,
    ) -> None:
        self.model = model
        self._wanted = wanted or Wanted()
        self._current = current
        self._long_tokens = long_tokens
        self._head_takes_positions = "logits_to_keep" in inspect.signature(model.forward).parameters
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                # It would read ids from the device to see whether they are padding, of which a step has none.
                module.warn_if_padding_and_no_attention_mask = _nothing_is_padding  # type: ignore[method-assign]
        self.last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=model.device)

    @property
    def device(self) -> torch.device:
        return self.model.device

    def logits(self, columns: Columns, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """`[len(tokens), head's width]`, of those of the step's tokens, int64; of all of them if None."""
        narrowed = tokens is not None and self._head_takes_positions
        options = {"logits_to_keep": tokens} if tokens is not None and narrowed else {}
        logits: torch.Tensor = self._run(columns, self.model, **options).logits[0]
        return logits if tokens is None or narrowed else logits.index_select(0, tokens)

    def hidden(self, columns: Columns, tokens: torch.Tensor) -> torch.Tensor:
        """`[len(tokens), width]`: what the model's head would be given, of those of the step's tokens, int64."""
        with self._wanted.only(tokens):
            hidden: torch.Tensor = self._run(columns, self.model.base_model).last_hidden_state[0]
            return hidden if self._wanted.heard else hidden.index_select(0, tokens)

    def logits_and_head(self, columns: Columns, tokens: torch.Tensor) -> tuple[torch.Tensor, Head]:
        """As `logits`, and besides what gives those of others of the step's tokens, a few at a time.

        It is the model's own forward again, with all that it may do to logits; what comes before its head is handed to
        it, as this pass has made it.
        """
        made: list[Any] = []
        decoder = self.model.get_decoder()
        with contextlib.ExitStack() as hooks:
            if isinstance(decoder, torch.nn.Module) and decoder is not self.model:
                hook = decoder.register_forward_hook(lambda _module, _inputs, output: made.append(output))
                hooks.callback(hook.remove)
            logits = self.logits(columns, tokens)
        if made and isinstance(made[-1], ModelOutput) and "last_hidden_state" in made[-1]:
            return logits, functools.partial(self._head, columns, decoder, made[-1])
        whole = self.logits(columns)  # a model that is not made of two parts; nothing to save
        return logits, functools.partial(whole.index_select, 0)

    def _head(self, columns: Columns, decoder: Any, output: Any, tokens: torch.Tensor) -> torch.Tensor:
        some = type(output)(last_hidden_state=output["last_hidden_state"].index_select(1, tokens))
        own = vars(decoder).get("forward")
        decoder.forward = lambda *_, **__: some
        try:
            logits: torch.Tensor = self.model(input_ids=columns["token_ids"][None], use_cache=False).logits[0]
        finally:
            del decoder.forward
            if own is not None:
                decoder.forward = own
        return logits

    def without_logits(self, columns: Columns) -> None:
        """The same without a look at the head: keys and values are all that comes of it."""
        with self._wanted.only(columns["positions"].new_zeros(1, dtype=torch.int64)):  # as few as there can be
            self._run(columns, self.model.base_model)

    def _run(self, columns: Columns, module: torch.nn.Module, **options: torch.Tensor) -> Any:
        token_ids = columns["token_ids"]
        if "token_rows" in columns:
            token_ids = torch.where(token_ids < 0, self.last_tokens.index_select(0, columns["token_rows"]), token_ids)
        self._current.tensors = step_tensors(columns)
        self._long_tokens.flags = columns.get("is_long")
        try:
            return module(
                input_ids=token_ids[None], position_ids=columns["positions"][None], use_cache=False, **options
            )
        finally:
            self._current.tensors = None
            self._long_tokens.flags = None


def _nothing_is_padding(*_: object) -> None:
    pass
