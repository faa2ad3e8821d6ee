"""Log-probabilities of prompts: of whose tokens a plan's result will tell, and what has been told.

Entry i of a sequence's `prompt_logprobs` is of its token i + 1, from the logits of position i. They come in order. A
sequence that begins anew goes on with the first that is missing: only what lies before may be found in the prefix
cache, and what comes twice is dropped.
"""

from dataclasses import dataclass, replace

import numpy as np

from scheduler_svc.core.sequence import Sampling, Sequence, State, TokenLogprobs, writable
from scheduler_svc.core.state import CoreState


@dataclass(frozen=True, slots=True)
class Scored:
    """Entries `begin` to `begin + count`, exclusive, of a sequence's `prompt_logprobs`."""

    sequence: Sequence
    begin: int
    count: int


def sampling_to_start_with(sequence: Sequence) -> Sampling:
    """Asks for no entries once all have come."""
    sampling = sequence.sampling
    if sampling.prompt_logprobs is None or sequence.lacks_prompt_logprobs:
        return sampling
    return replace(sampling, prompt_logprobs=None)


def planned(state: CoreState, rows: np.ndarray, num_tokens: np.ndarray) -> tuple[Scored, ...]:
    """What the result of a plan with this schedule will tell, in its order; `num_computed` is past the plan already."""
    num_computed = state.columns.num_computed
    scoring = {sequence.row: sequence for sequence in state.scoring if sequence.state is State.RUNNING}
    scored = []
    for row, count in zip(rows.tolist(), num_tokens.tolist(), strict=True):
        sequence = scoring.get(row)
        if sequence is not None and count:
            begin = int(num_computed[row]) - count
            count = min(int(num_computed[row]), sequence.num_prompt - 1) - begin
            if count > 0:
                scored.append(Scored(sequence, begin, count))
    state.scoring = [s for row, s in scoring.items() if num_computed[row] < s.num_prompt - 1]
    return tuple(scored)


def take(scored: Scored, entries: list[TokenLogprobs]) -> bool:
    """Take in what was told. False where the model's logits were not finite."""
    sequence = scored.sequence
    if sequence.state is State.ENDED:
        return True
    num_known = len(sequence.prompt_logprobs) - scored.begin  # of these entries
    writable(sequence.prompt_logprobs).extend(entries[num_known:])
    return all(entry.rank > 0 for entry in entries)
