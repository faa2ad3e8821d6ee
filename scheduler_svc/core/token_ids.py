"""Ids of tokens as Python numbers, one object for each id."""

import numpy as np

MAX_KEPT = 1 << 20  # no vocabulary is larger; 40 MB


class TokenIds:
    """Without it each token of each answer is an object of 32 bytes, and those of all streams lie between each other: a
    page that holds one of a stream which goes on is kept for all of them."""

    def __init__(self) -> None:
        self._ids = np.zeros(0, object)  # grows to the highest id that has come

    def of(self, tokens: np.ndarray) -> list[int]:
        """As `tokens.tolist()`, of ids that are not negative."""
        most = int(tokens.max(initial=-1))
        if most >= MAX_KEPT:
            ids: list[int] = tokens.tolist()
            return ids
        if most >= len(self._ids):
            self._ids = np.arange(1 << most.bit_length()).astype(object)
        found: list[int] = self._ids[tokens].tolist()
        return found


TOKEN_IDS = TokenIds()  # of the process
