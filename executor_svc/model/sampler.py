"""Draws the next token of every sampling row of a step; what a row does not ask for costs nothing.

Order, as documented at `SamplingParams`: repetition, frequency and presence penalties; end tokens held back by
min_tokens; temperature; top_k; top_p; min_p; draw.
"""

from dataclasses import dataclass

import numpy as np
import torch

from executor_svc.model.drawing import DrawParameters, draw
from executor_svc.model.penalties import Penalties, TokenCounts
from executor_svc.model.randomness import random_uniform
from executor_svc.model.token_logprobs import token_logprobs
from executor_svc.step import Int32s, Logprobs, RowStart
from paged.v1 import executor_pb2


class ForkWithoutCounts(ValueError):
    """A child asks for penalties, and its parent, having none, has not counted its tokens."""

    def __init__(self, parent: int, child: int) -> None:
        super().__init__(
            f"fork_sampling: row {child} has a penalty and its parent, row {parent}, has none; "
            "give both a penalty, or start the child as a row of its own"
        )


@dataclass(frozen=True, slots=True)
class RowState:
    """How a row samples, and how many of its tokens are prompt."""

    sampling: executor_pb2.RowSampling
    num_prompt: int

    @property
    def greedy(self) -> bool:
        return self.sampling.temperature == 0 or self.sampling.top_k == 1

    @property
    def filtered(self) -> bool:
        return self.sampling.top_k > 0 or self.sampling.top_p < 1 or self.sampling.min_p > 0


class Sampler:
    """Owns what sampling needs to know of each live row. Ids it draws are below `vocab_size`, however wide the head."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._rows: dict[int, RowState] = {}
        self._penalties = Penalties(vocab_size, device)

    def start_rows(self, starts: list[RowStart]) -> None:
        for start in starts:
            self._set_row(start.row, RowState(start.sampling, start.num_prompt))
            if Penalties.wanted(start.sampling):
                self._penalties.start(start.row, start.token_ids, start.num_prompt)

    def fork_rows(self, parents: Int32s, children: Int32s, sampling: list[executor_pb2.RowSampling]) -> None:
        """Raises ForkWithoutCounts."""
        before: list[tuple[RowState, TokenCounts | None]] = [
            (self._rows[parent], self._penalties.snapshot(parent)) for parent in parents.tolist()
        ]
        forks = zip(parents.tolist(), children.tolist(), before, sampling, strict=True)
        for parent, child, (state, counts), own in forks:
            self._set_row(child, RowState(own, state.num_prompt))
            if Penalties.wanted(own):
                if counts is None:
                    raise ForkWithoutCounts(parent, child)
                self._penalties.restore(child, counts)

    def end_rows(self, rows: Int32s) -> None:
        for row in rows.tolist():
            self._rows.pop(row, None)
            self._penalties.end(row)

    def clear(self) -> None:
        self._rows.clear()
        self._penalties.clear()

    def sample(self, logits: torch.Tensor, rows: Int32s, positions: Int32s) -> tuple[torch.Tensor, Logprobs | None]:
        """Draw a token for each row: int64 `[num_rows]` on the device, -1 where its logits are not finite.

        logits: `[num_rows, head's width]`, any float dtype. positions: int32 `[num_rows]`, of the tokens to be drawn.
        Log-probabilities are of the rows that ask for them, in their order; None where no row does.
        """
        logits = logits[:, : self._vocab_size]
        states = [self._rows[row] for row in rows.tolist()]
        processed = self._process(logits, rows, states, positions)
        highest, drawn = processed.max(dim=-1)
        random = [i for i, state in enumerate(states) if not state.greedy]
        if random:
            drawn[random] = self._draw(processed[random].float(), [states[i] for i in random], positions[random])
        # max() passes NaN on. Penalties keep what is not finite so, except that held-back tokens hide; look twice.
        usable = torch.isfinite(highest)
        if processed is not logits:
            usable &= torch.isfinite(logits.amax(-1))
        drawn = drawn.masked_fill(~usable, -1)
        counted = [i for i, row in enumerate(rows.tolist()) if row in self._penalties]
        if counted:
            self._penalties.add(rows[counted].tolist(), drawn[counted])
        return drawn, self._logprobs(logits, drawn, states)

    def _set_row(self, row: int, state: RowState) -> None:
        self._penalties.end(row)
        self._rows[row] = state

    def _process(self, logits: torch.Tensor, rows: Int32s, states: list[RowState], positions: Int32s) -> torch.Tensor:
        """Penalties and min_tokens; the logits themselves where no row needs either."""
        penalised = [i for i, row in enumerate(rows.tolist()) if row in self._penalties]
        held_back = [
            i
            for i, state in enumerate(states)
            if state.sampling.end_token_ids and positions[i] - state.num_prompt < state.sampling.min_tokens
        ]
        if not penalised and not held_back:
            return logits
        processed = logits.to(torch.float32, copy=True)
        if penalised:
            sampling = [states[i].sampling for i in penalised]
            processed[penalised] = self._penalties.apply(processed[penalised], rows[penalised].tolist(), sampling)
        for i in held_back:
            ends = [token for token in states[i].sampling.end_token_ids if token < self._vocab_size]
            processed[i, ends] = -torch.inf
        return processed

    def _draw(self, logits: torch.Tensor, states: list[RowState], positions: Int32s) -> torch.Tensor:
        sampling = [state.sampling for state in states]
        u = random_uniform([s.seed for s in sampling], [s.index for s in sampling], positions)

        def column(values: list[float] | list[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self._device)

        parameters = DrawParameters(
            temperature=column([s.temperature for s in sampling], torch.float32),
            top_k=column([s.top_k or self._vocab_size for s in sampling], torch.int64),
            top_p=column([s.top_p for s in sampling], torch.float32),
            min_p=column([s.min_p for s in sampling], torch.float32),
            u=torch.from_numpy(u).to(self._device),
        )
        return draw(logits, parameters, filtered=any(state.filtered for state in states))

    def _logprobs(self, logits: torch.Tensor, drawn: torch.Tensor, states: list[RowState]) -> Logprobs | None:
        asking = [i for i, state in enumerate(states) if state.sampling.HasField("logprobs")]
        if not asking:
            return None
        num_top = np.array([states[i].sampling.logprobs for i in asking], np.int32)
        return token_logprobs(logits[asking], drawn[asking], num_top)
