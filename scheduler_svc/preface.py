"""What an answer begins with: what was asked for of its prompt."""

from scheduler_svc.core.sequence import Sequence
from scheduler_svc.requests import Delta

MAX_PREFACE_TOKENS = 1024  # in one delta


class Preface:
    """The prompt's log-probabilities, for the sample that has them, and its tokens with their text where `echo` is that
    text; in as many deltas as that takes. To be begun once the answer has a token: all is known by then."""

    def __init__(self, sequence: Sequence, echo: str | None) -> None:
        self._sequence = sequence
        self._echo = echo
        self._begin = 0

    @staticmethod
    def wanted(sequence: Sequence, echo: str | None) -> bool:
        return echo is not None or sequence.sampling.prompt_logprobs is not None

    @property
    def is_over(self) -> bool:
        return self._begin >= self._sequence.num_prompt

    def next_delta(self) -> Delta:
        sequence, begin = self._sequence, self._begin
        end = self._begin = min(begin + MAX_PREFACE_TOKENS, sequence.num_prompt)
        text = self._echo or ""
        first, last = (len(text) * place // sequence.num_prompt for place in (begin, end))
        return Delta(
            text=text[first:last],
            index=sequence.sampling.index,
            prompt_token_ids=sequence.token_ids[begin:end] if self._echo is not None else [],
            prompt_logprobs=sequence.prompt_logprobs[begin:end],
        )
