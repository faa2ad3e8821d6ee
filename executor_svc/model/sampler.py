"""Draws the next token of every sampling row of a step; what a row does not ask for costs nothing.

Order, as documented at `SamplingParams`: biases; repetition, frequency and presence penalties; allowed tokens; banned
sequences; masks (of grammars); end tokens held back by min_tokens; temperature; top_k; top_p; min_p; draw. (What is not
allowed is added as minus infinity together with the biases: no penalty brings that back.)

What is to be done follows from the rows' parameters, on the host; the device is given all of it, and never asked.
"""

from collections.abc import Mapping

import torch

from executor_svc.model.drawing import DrawParameters, draw
from executor_svc.model.row_tables import RowTables
from executor_svc.model.sampling_plan import SamplingPlan, plan_sampling
from executor_svc.model.sampling_rows import SamplingRows
from executor_svc.model.staging import Readback, Staging
from executor_svc.model.token_logprobs import LogprobTensors, logprob_columns, token_logprobs
from executor_svc.model.token_masks import forbid
from executor_svc.step import Int32s, Logprobs, Masks, RowStart
from paged.v1 import executor_pb2


class Sampler:
    """Owns what sampling needs to know of each live row. Ids it draws are below `vocab_size`, however wide the head."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._rows = SamplingRows(vocab_size)
        self._tables = RowTables(vocab_size, device)
        self._staging, self._readback = Staging(device), Readback(device)

    def start_rows(self, starts: list[RowStart]) -> None:
        for start in starts:
            self._end(start.row)
            places = self._tables.start(start.sampling, start.token_ids, start.num_prompt)
            self._rows.set(start.row, start.sampling, start.num_prompt, places)

    def fork_rows(self, parents: Int32s, children: Int32s, sampling: list[executor_pb2.RowSampling]) -> None:
        """Raises ForkWithoutPast."""
        before = [
            (self._rows.num_prompt(parent), self._tables.past(self._rows.places(parent))) for parent in parents.tolist()
        ]
        forks = zip(parents.tolist(), children.tolist(), before, sampling, strict=True)
        for parent, child, (num_prompt, past), own in forks:
            self._end(child)
            self._rows.set(child, own, num_prompt, self._tables.fork(own, past, parent, child))

    def end_rows(self, rows: Int32s) -> None:
        for row in rows.tolist():
            self._end(row)

    def clear(self) -> None:
        self._rows.clear()
        self._tables.clear()

    def sample(
        self, logits: torch.Tensor, rows: Int32s, positions: Int32s, masks: Masks | None = None
    ) -> tuple[torch.Tensor, Logprobs | None]:
        """Draw a token for each row: int64 `[num_rows]` on the device, -1 where its logits are not finite.

        logits: `[num_rows, head's width]`, any float dtype. positions: int32 `[num_rows]`, of the tokens to be drawn.
        Log-probabilities are of the rows that ask for them, in their order; None where no row does.
        """
        plan = self.plan(rows, positions, masks)
        drawn, logprobs = self.launch(logits, plan, self._staging.to_device(plan.columns))
        if logprobs is None:
            return drawn, None
        return drawn, logprob_columns(*self._readback.read(logprobs), num_top=plan.num_top)

    def plan(self, rows: Int32s, positions: Int32s, masks: Masks | None = None) -> SamplingPlan:
        """What `launch` is to do; its columns must be brought to the device first. Shapes as in `sample`."""
        return plan_sampling(self._rows, rows, positions, self._vocab_size, masks)

    def launch(
        self, logits: torch.Tensor, plan: SamplingPlan, columns: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, LogprobTensors | None]:
        """As `sample`, with the plan's columns on the device; log-probabilities stay there. Waits for nothing."""
        logits = logits[:, : self._vocab_size]
        processed = self._process(logits, plan, columns)
        highest, drawn = processed.max(dim=-1)
        if len(plan.drawn) == plan.num_rows:
            drawn = draw(processed.float(), self._draw_parameters(columns), plan.parts)
        elif len(plan.drawn):
            places = columns["sample_drawn"]
            chosen = draw(processed.index_select(0, places).float(), self._draw_parameters(columns), plan.parts)
            drawn = drawn.index_copy_(0, places, chosen)
        # max() passes NaN on, and so does what changes logits, except where it hides them; look twice.
        usable = torch.isfinite(highest)
        if processed is not logits:
            usable &= torch.isfinite(logits.amax(-1))
        drawn = drawn.masked_fill(~usable, -1)
        self._tables.add(drawn, plan, columns)
        if not len(plan.asking):
            return drawn, None
        asking = columns["sample_asking"]
        most = int(plan.num_top.max())
        return drawn, token_logprobs(logits.index_select(0, asking), drawn.index_select(0, asking), most)

    def _end(self, row: int) -> None:
        self._tables.end(self._rows.places(row))
        self._rows.end(row)

    def _process(self, logits: torch.Tensor, plan: SamplingPlan, columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What comes before the temperature; the logits themselves where no row needs any of it."""
        if not (plan.changes_logits or plan.num_masked or plan.num_held_back):
            return logits
        processed = logits.to(torch.float32, copy=True).contiguous()
        self._tables.apply(processed, plan, columns)
        if plan.num_masked:
            forbid(processed, columns["sample_masked"], columns["sample_masks"], plan.num_masked)
        if plan.num_held_back:
            processed.view(-1).index_fill_(0, columns["sample_held_back"], -torch.inf)
        return processed

    @staticmethod
    def _draw_parameters(columns: Mapping[str, torch.Tensor]) -> DrawParameters:
        return DrawParameters(
            temperature=columns["sample_temperature"],
            u=columns["sample_u"],
            top_k=columns.get("sample_top_k"),
            nucleus=columns.get("sample_nucleus"),
            top_p=columns.get("sample_top_p"),
            min_p=columns.get("sample_min_p"),
        )
