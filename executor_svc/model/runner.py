"""One step of a real model: copies, forward pass, sampling."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from executor_svc.model.attention import CurrentStep
from executor_svc.model.decode_graphs import DecodeGraphs, Recorder
from executor_svc.model.device import first_line
from executor_svc.model.forward import Columns, Forward
from executor_svc.model.fused import GreedyHead, Wanted
from executor_svc.model.memory import KVMemory
from executor_svc.model.prompt_scores import score_tokens
from executor_svc.model.rotary import LongTokens
from executor_svc.model.sampler import Sampler
from executor_svc.model.sampling_plan import SamplingPlan
from executor_svc.model.staging import Column, Readback, Staging
from executor_svc.model.step_columns import step_columns, token_rows
from executor_svc.model.token_logprobs import LogprobTensors, logprob_columns
from executor_svc.step import Int32s, RowStart, Scored, Step, StepOutput
from kernels import Backend
from paged.v1 import executor_pb2


@dataclass(frozen=True, slots=True)
class DeviceOutput:
    """What a step is making: `drawn` int32 `[num_sampling]`, on the device."""

    drawn: torch.Tensor
    logprobs: LogprobTensors | None
    plan: SamplingPlan
    scored: LogprobTensors | None = None


class StepOutOfMemory(RuntimeError):
    """A step took more memory of the device than there was."""

    def __init__(self, step: Step, error: torch.OutOfMemoryError) -> None:
        super().__init__(
            f"a step of {len(step.rows)} rows and {len(step.token_ids)} tokens ran out of memory; lower "
            f"tokens_per_step, max_rows or memory_share, or set kv_memory to less ({first_line(error)})"
        )


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device has all of; `output` is None where no row samples."""

    step: Step
    output: DeviceOutput | None
    readback: Readback

    def result(self) -> StepOutput:
        """As the seam says. Raises StepOutOfMemory."""
        output, scored_tokens = self.output, self.step.scored
        if output is None:
            return StepOutput(np.empty(0, np.int32))
        logprobs, scored = output.logprobs or (), output.scored or ()
        try:
            drawn, *rest = self.readback.read([output.drawn, *logprobs, *scored])
        except torch.OutOfMemoryError as error:
            raise StepOutOfMemory(self.step, error) from error
        own, prompts = rest[: len(logprobs)], rest[len(logprobs) :]
        return StepOutput(
            drawn.astype(np.int32, copy=False),
            logprob_columns(*own, num_top=output.plan.num_top) if own else None,
            logprob_columns(*prompts, num_top=scored_tokens.num_top) if scored_tokens is not None else None,
        )


def _own(drawn: torch.Tensor) -> torch.Tensor:
    return drawn


class ModelRunner:
    """A `executor_svc.step.Runner`. Keeps each row's last token on the device; one step at a time, one thread.

    The model's attention layers must be attached to `memory`'s caches and to `current`, its rotary modules to
    `long_tokens`; a row is a long one if it starts with more than `rope_switch_len` tokens, unless that is 0. Decode
    steps go through `graphs` while it is set. What was drawn, int64 on the device, becomes what `agreed` makes of it.
    With a `greedy_head`, steps of greedy rows alone are without logits.
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
        agreed: Callable[[torch.Tensor], torch.Tensor] = _own,
        greedy_head: GreedyHead | None = None,
        wanted: Wanted | None = None,
    ) -> None:
        self._memory = memory
        self._agreed = agreed
        self._backend = backend
        self._rope_switch_len = rope_switch_len
        self._vocab_size = vocab_size
        self._is_long = np.zeros(max_rows, np.bool_)
        self._sampler = Sampler(vocab_size, model.device)
        self._staging, self._readback = Staging(model.device), Readback(model.device)
        self.overlaps = model.device.type == "cuda"
        self.forward = Forward(model, current, long_tokens, max_rows, wanted)
        self._greedy_head = greedy_head
        self.graphs: DecodeGraphs | None = None

    def start_rows(self, starts: list[RowStart]) -> None:
        self._sampler.start_rows(starts)
        for start in starts:
            self._is_long[start.row] = len(start.token_ids) > self._rope_switch_len

    def fork_rows(
        self,
        parents: Int32s,
        children: Int32s,
        sampling: list[executor_pb2.RowSampling],
        tokens: Int32s | None = None,
    ) -> None:
        own = {} if tokens is None else {"tokens": tokens.astype(np.int64)}
        rows = self._staging.to_device(
            {"parents": parents.astype(np.int64), "children": children.astype(np.int64)} | own
        )
        last_tokens = self.forward.last_tokens
        handed_on = last_tokens.index_select(0, rows["parents"]) if tokens is None else rows["tokens"]
        last_tokens.index_copy_(0, rows["children"], handed_on.to(last_tokens.dtype))
        self._sampler.fork_rows(parents, children, sampling)
        self._is_long[children] = self._is_long[parents]

    def end_rows(self, rows: Int32s) -> None:
        self._sampler.end_rows(rows)

    def reset(self) -> None:
        # What KV memory holds need not go: no slot is read before it has been written in the new epoch.
        self._sampler.clear()
        if self.forward.device.type == "cuda":
            torch.cuda.empty_cache()  # a step that ran out of memory has left it in pieces

    def launch(self, step: Step) -> LaunchedStep:
        """Give the device all of a step's work and wait for none of it. Raises StepOutOfMemory, and so does the
        result."""
        try:
            return LaunchedStep(step, self._launch(step), self._readback)
        except torch.OutOfMemoryError as error:
            raise StepOutOfMemory(step, error) from error

    def _launch(self, step: Step) -> DeviceOutput | None:
        graphs = self.graphs if self.graphs is not None and self.graphs.fit(step) else None
        rows, positions = step.rows, step.context_lens
        if not step.all_draw:
            rows, positions = step.drawing_rows, positions[step.drawing_places]
        plan = self._sampler.plan(rows, positions, step.masks)
        long = self._long_column(step)
        self._memory.expect(step.slots, self._backend)
        columns = step_columns(step) | long if graphs is None else graphs.columns(step, long)
        with torch.inference_mode():
            tensors = self._staging.to_device(columns | plan.columns)
            if len(step.copy_sources):
                self._backend.copy_blocks(self._memory.tensors, tensors["copy_sources"], tensors["copy_destinations"])
            if not len(step.rows):
                return None
            if step.scored is not None:
                return self._launch_scored(step.scored, plan, tensors)
            if not len(rows):
                self.forward.without_logits(tensors)
                return None
            if graphs is not None:
                logits = graphs.run(tensors, step)
            elif self._greedy_head is not None and plan.takes_the_likeliest:
                hidden = self.forward.hidden(tensors, tensors["last_tokens"])
                return self._keep(self._greedy_head(hidden, self._vocab_size), None, plan, tensors)
            else:
                logits = self.forward.logits(tensors, tensors["last_tokens"])
            return self._sample(logits, plan, tensors)

    def _launch_scored(self, scored: Scored, plan: SamplingPlan, tensors: Columns) -> DeviceOutput:
        tokens = tensors["last_tokens"] if plan.num_rows else tensors["scored_places"][:1]
        logits, head = self.forward.logits_and_head(tensors, tokens)
        logprobs = score_tokens(
            head,
            tensors["scored_places"],
            tensors["scored_targets"],
            num_top=int(scored.num_top.max()),
            vocab_size=self._vocab_size,
            max_rows=len(self._is_long),
        )
        if not plan.num_rows:
            return DeviceOutput(logprobs.ranks.new_empty(0, dtype=torch.int32), None, plan, logprobs)
        return replace(self._sample(logits, plan, tensors), scored=logprobs)

    def record_graphs(self, recorder: Recorder, table_width: int) -> None:
        """Record decode steps of all sizes, and use them from now on; no row may be live. `table_width` is the most
        blocks that a row may have. What the recorder raises comes out, and nothing is used."""
        graphs = DecodeGraphs(
            self.forward.logits,
            max_rows=len(self._is_long),
            table_width=table_width,
            device=self.forward.device,
            long_rope=self._rope_switch_len > 0,
        )
        with torch.inference_mode():
            graphs.record(recorder)
        self.graphs = graphs

    def _long_column(self, step: Step) -> dict[str, Column]:
        """For each token whether its row is a long one; nothing where the model makes no difference."""
        return {"is_long": self._is_long[token_rows(step)]} if self._rope_switch_len else {}

    def _sample(self, logits: torch.Tensor, plan: SamplingPlan, tensors: Columns) -> DeviceOutput:
        return self._keep(*self._sampler.launch(logits, plan, tensors), plan, tensors)

    def _keep(
        self, drawn: torch.Tensor, logprobs: LogprobTensors | None, plan: SamplingPlan, tensors: Columns
    ) -> DeviceOutput:
        drawn = self._agreed(drawn)
        # A row whose logits were not finite may be in the next step already; its token must be one the model has.
        self.forward.last_tokens.index_copy_(0, tensors["sampling_rows"], drawn.clamp_min(0))
        return DeviceOutput(drawn.int(), logprobs, plan)
