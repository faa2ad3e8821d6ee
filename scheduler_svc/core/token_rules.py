"""Which tokens may be drawn, and which are preferred: rules that a request states of single ids and of sequences."""

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


NO_RULES = TokenRules()
