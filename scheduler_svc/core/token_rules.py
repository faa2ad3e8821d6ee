"""Which tokens may be drawn, and which are preferred: rules that a request states of single ids and of sequences."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenRules:
    """`logit_bias` are (id, what is added to its logit), each id once. If there are `allowed_ids`, no others are drawn.
    Tokens, prompt included, never come to end with one of the `banned` sequences."""

    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()

    @property
    def num_sent(self) -> int:
        """Numbers that a plan names for each row that has these rules."""
        return 2 * len(self.logit_bias) + len(self.allowed_ids) + sum(1 + len(ids) for ids in self.banned)

    def leave_any_of(self, mask: bytes, token_ids: Sequence[int], held_back: Collection[int]) -> bool:
        """Whether after these tokens one at least may be drawn that the mask allows (as in `StepPlan.masks`) and that
        is not held back."""
        never = set(held_back)
        for *begin, last in self.banned:
            if len(begin) <= len(token_ids) and begin == token_ids[len(token_ids) - len(begin) :]:
                never.add(last)
        if self.allowed_ids:
            return any(allows(mask, token) and token not in never for token in self.allowed_ids)
        return int.from_bytes(mask).bit_count() > sum(allows(mask, token) for token in never)


def allows(mask: bytes, token: int) -> bool:
    """Whether the token is one of the mask's."""
    return bool(mask[token >> 3] >> (token & 7) & 1)


NO_RULES = TokenRules()
