"""Beam search over whole vocabularies, in the fewest words: what the core's groups must come to."""

from collections.abc import Callable

from scheduler_svc.core.sequence import TokenLogprobs
from tests.core.plain_executor import likely_tokens

NONE = -1e9


def beam_answers(
    prompt: list[int],
    width: int,
    max_tokens: int,
    *,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    end_ids: tuple[int, ...] = (),
    min_tokens: int = 0,
    likely: Callable[[list[int], int, int], TokenLogprobs] = likely_tokens,
) -> list[tuple[list[int], float]]:
    """Outputs and scores, best first."""
    beams = [([], 0.0)] + [([], NONE)] * (width - 1)
    answers = [([], NONE)] * width
    num_kept = (1 + max(1, len(end_ids))) * width
    for length in range(1, max_tokens + 1):
        found = []
        for output, total in beams:
            entry = likely(prompt + output, 0, num_kept)
            for token, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
                held = length <= min_tokens and token in end_ids
                found.append(([*output, token], total + logprob + (NONE if held else 0)))
        found.sort(key=lambda entry: -entry[1])
        found = found[:num_kept]
        ends = [output[-1] in end_ids or length == max_tokens for output, _ in found]
        ended = [(found[i][0], found[i][1] / length**length_penalty) for i in range(width) if ends[i]]
        answers = sorted(answers + ended, key=lambda entry: -entry[1])[:width]
        beams = [entry for entry, e in zip(found, ends, strict=True) if not e][:width]
        full = all(score > NONE / 2 for _, score in answers)
        at = max_tokens if early_stopping == "never" and length_penalty > 0 else length
        if not beams or (full and (early_stopping is True or beams[0][1] / at**length_penalty <= answers[-1][1])):
            break
    return answers
