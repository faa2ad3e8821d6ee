"""One step of a real model: copies, forward pass, sampling."""

import inspect

import numpy as np
import torch
from transformers import PreTrainedModel

from executor_svc.model.attention import CurrentStep, StepTensors
from executor_svc.model.memory import KVMemory
from executor_svc.model.rotary import LongTokens
from executor_svc.model.sampler import Sampler
from executor_svc.step import Int32s, RowStart, Step, StepOutput
from kernels import Backend
from paged.v1 import executor_pb2


class ModelRunner:
    """A `executor_svc.step.Runner`. Keeps each row's last token on the device; one step at a time, one thread.

    The model's attention layers must be attached to `memory`'s caches and to `current`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        memory: KVMemory,
        current: CurrentStep,
        backend: Backend,
        *,
        vocab_size: int,
        max_rows: int,
        long_tokens: LongTokens,
        rope_switch_len: int,
    ) -> None:
        self._model = model
        self._memory = memory
        self._current = current
        self._backend = backend
        self._device = model.device
        self._last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=self._device)
        self._sampler = Sampler(vocab_size, self._device)
        self._long_tokens = long_tokens
        self._rope_switch_len = rope_switch_len
        self._is_long = np.zeros(max_rows, np.bool_)
        self._head_takes_positions = "logits_to_keep" in inspect.signature(model.forward).parameters

    def start_rows(self, starts: list[RowStart]) -> None:
        self._sampler.start_rows(starts)
        for start in starts:
            self._is_long[start.row] = len(start.token_ids) > self._rope_switch_len

    def fork_rows(self, parents: Int32s, children: Int32s, sampling: list[executor_pb2.RowSampling]) -> None:
        self._last_tokens[self._ids(children)] = self._last_tokens[self._ids(parents)]
        self._sampler.fork_rows(parents, children, sampling)
        self._is_long[children] = self._is_long[parents]

    def end_rows(self, rows: Int32s) -> None:
        self._sampler.end_rows(rows)

    def reset(self) -> None:
        # What KV memory holds need not go: no slot is read before it has been written in the new epoch.
        self._sampler.clear()

    def run(self, step: Step) -> StepOutput:
        with torch.inference_mode():
            if len(step.copy_sources):
                self._backend.copy_blocks(
                    self._memory.tensors, self._ids(step.copy_sources), self._ids(step.copy_destinations)
                )
            if not len(step.rows):
                return StepOutput(step.rows)
            self._current.tensors = self._to_device(step)
            if self._rope_switch_len:
                is_long = self._is_long[step.rows].repeat(np.diff(step.query_start))
                self._long_tokens.flags = torch.from_numpy(is_long).to(self._device)
            try:
                logits = self._forward(step)
            finally:
                self._current.tensors = None
            if logits is None:
                return StepOutput(step.rows[:0])
            return self._sample(logits, step)

    def _forward(self, step: Step) -> torch.Tensor | None:
        """Logits of the sampling rows, `[num_sampling, head's width]`; None, without a look at the head, for none."""
        inputs = {
            "input_ids": self._input_ids(step)[None],
            "position_ids": self._ids(step.positions)[None],
            "use_cache": False,
        }
        if not step.samples.any():
            self._model.base_model(**inputs)
            return None
        last = self._ids(step.query_start[1:][step.samples] - 1)
        if self._head_takes_positions:
            logits: torch.Tensor = self._model(**inputs, logits_to_keep=last).logits[0]
            return logits
        logits = self._model(**inputs).logits[0]
        return logits[last]

    def _sample(self, logits: torch.Tensor, step: Step) -> StepOutput:
        rows = step.rows[step.samples]
        drawn, logprobs = self._sampler.sample(logits, rows, step.context_lens[step.samples])
        # A row whose logits were not finite may be in the next step already; its token must be one the model has.
        self._last_tokens[self._ids(rows)] = drawn.clamp_min(0)
        return StepOutput(drawn.to(torch.int32).cpu().numpy(), logprobs)

    def _input_ids(self, step: Step) -> torch.Tensor:
        token_ids = self._ids(step.token_ids)
        unknown = step.token_ids < 0
        if unknown.any():
            rows = step.rows.repeat(step.query_start[1:] - step.query_start[:-1])[unknown]
            token_ids[torch.from_numpy(unknown).to(self._device)] = self._last_tokens[self._ids(rows)]
        return token_ids

    def _to_device(self, step: Step) -> StepTensors:
        def int32(column: Int32s) -> torch.Tensor:
            return torch.tensor(column, dtype=torch.int32, device=self._device)

        return StepTensors(
            slots=torch.tensor(step.slots, dtype=torch.int64, device=self._device),
            block_tables=int32(step.block_tables),
            query_start=int32(step.query_start),
            context_lens=int32(step.context_lens),
        )

    def _ids(self, column: Int32s) -> torch.Tensor:
        return torch.tensor(column, dtype=torch.int64, device=self._device)
