"""The seam between the resident batch and a runner: what one step computes, and what comes of it.

Everything here is host memory (numpy); a runner moves what it needs to its device. The simulated runner and the
real one stand behind the same `Runner`.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from paged.v1 import executor_pb2

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RowStart:
    """A sequence that begins in a row. `token_ids` are all that are known, prompt first: int32 [num_known]."""

    row: int
    token_ids: Int32s
    num_prompt: int
    sampling: executor_pb2.RowSampling


@dataclass(frozen=True, slots=True)
class Draws:
    """Who gets a token, in schedule order, where some draw from logits that another row has computed."""

    rows: Int32s  # [num_drawing]
    places: Int32s  # [num_drawing]; in the step's `rows`, of the one whose last logits they are


@dataclass(frozen=True, slots=True)
class Masks:
    """Rows that draw from some ids alone, in this step."""

    places: Int32s  # [num_masked]; among the rows that draw, ascending
    allowed: NDArray[np.uint8]  # [num_masked, mask_bytes(vocabulary size)]; id i is allowed by bit i % 8 of byte i // 8


def mask_bytes(vocab_size: int) -> int:
    """Bytes of a mask: whole words of 32 bits."""
    return -(-vocab_size // 32) * 4


@dataclass(frozen=True, slots=True)
class Scored:
    """Tokens of prompts whose log-probabilities are wanted, row after row in schedule order."""

    places: NDArray[np.int64]  # [num_scored]; the token of the step whose logits are looked at
    targets: Int32s  # [num_scored]; the token that follows it in the prompt
    num_top: NDArray[np.int64]  # [num_scored]; alternatives to report


@dataclass(frozen=True, slots=True)
class SharedSegments:
    """Runs of blocks that rows of the step have at the same places of their tables, after the same blocks.

    Segment i covers the places `first[i] : end[i]` for the rows `rows[row_start[i] : row_start[i + 1]]`, two or more,
    each with one token in the step whose position lies behind the segment. The segments of row r, from the first place
    on and one after another, cover the places before `own_start[r]`. Segments are in the order of their first places.
    """

    first: Int32s  # [num_segments]
    end: Int32s  # [num_segments]
    row_start: Int32s  # [num_segments + 1]
    rows: Int32s  # [row_start[-1]]; places in the step's `rows`
    own_start: Int32s  # [num_rows]; 0 where the row shares nothing

    @property
    def num_saved_blocks(self) -> int:
        """How many fewer are read than if each row read its own."""
        return int(((np.diff(self.row_start) - 1) * (self.end - self.first)).sum())


@dataclass(slots=True)
class Step:
    """One forward pass over the tokens of all scheduled rows, flattened row after row.

    Order of effects: copies, then K/V of every token to its slot, then attention, then a token for each sampling row.
    Arrays are to be read, and not to be kept for longer than the step; until its result is there they stay as they are.
    """

    rows: Int32s  # [num_rows]
    query_start: Int32s  # [num_rows + 1]; row i has tokens query_start[i] : query_start[i + 1]
    token_ids: Int32s  # [num_tokens]; -1: the token that the row sampled last (known to the runner alone)
    positions: Int32s  # [num_tokens]
    slots: NDArray[np.int64]  # [num_tokens]; block_table[position // B] * B + position % B
    block_tables: Int32s  # [num_rows, most blocks of a row in this step]; unused entries are 0
    context_lens: Int32s  # [num_rows]; tokens that the row's last query sees, itself included
    samples: NDArray[np.bool_]  # [num_rows]; whose last logits are wanted
    copy_sources: Int32s  # [num_copies]; block ids
    copy_destinations: Int32s  # [num_copies]
    # If so, every row computes the one token that it sampled last, samples again, and has no block ahead of its need.
    decodes: bool = False
    draws: Draws | None = None  # None: each row that samples, for itself
    masks: Masks | None = None  # None: no row has one
    scored: Scored | None = None
    shared: SharedSegments | None = None  # None: nothing is

    @property
    def all_draw(self) -> bool:
        """Whether each row gets a token, and nobody else does."""
        return self.draws is None and bool(self.samples.all())

    @property
    def drawing_rows(self) -> Int32s:
        """[num_drawing]"""
        return self.rows[self.samples] if self.draws is None else self.draws.rows

    @property
    def drawing_places(self) -> NDArray[np.integer]:
        """[num_drawing]; see `Draws.places`."""
        return self.samples.nonzero()[0] if self.draws is None else self.draws.places


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Columns over the sampling rows that asked for k log-probabilities, in schedule order; as in `StepResult`.

    k + 1 entries a row: the drawn token, then the k most likely, best first.
    """

    ids: Int32s
    values: NDArray[np.float32]
    ranks: Int32s  # one a row: the drawn token's


@dataclass(slots=True)
class StepOutput:
    """`sampled_ids` int32, one for each row that draws, in order; -1 where the row's logits were not finite."""

    sampled_ids: Int32s
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None  # of the step's `scored` tokens, a rank each


class PendingStep(Protocol):
    """A step that was launched."""

    def result(self) -> StepOutput:
        """Wait for what comes of it; once. An exception means that KV memory is lost."""


class Runner(Protocol):
    """Owns KV memory and what belongs to a row on the device: its last token, its sampling state.

    Whatever is asked for has its effect in the order of the calls, also where the device is still busy with a step.
    """

    @property
    def overlaps(self) -> bool:
        """Whether the device computes by itself what was launched, so that the host can see to other things."""

    def start_rows(self, starts: list[RowStart]) -> None:
        """A sequence begins in each of these rows; whatever was there before is gone."""

    def fork_rows(
        self,
        parents: Int32s,
        children: Int32s,
        sampling: list[executor_pb2.RowSampling],
        tokens: Int32s | None = None,
    ) -> None:
        """Each child takes its parent's state as it is before this call, with sampling parameters of its own; and, if
        there are `tokens`, its own of these as the token that it has sampled last."""

    def end_rows(self, rows: Int32s) -> None:
        """These rows are free."""

    def launch(self, step: Step) -> PendingStep:
        """Begin one step; the result of the one before has been taken. An exception means that KV memory is lost."""

    def reset(self) -> None:
        """Begin a new epoch: no row is live, KV memory holds nothing."""
