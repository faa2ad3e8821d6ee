"""Incremental decoding with a tokenizer about which nothing is known but its `decode`."""

from collections.abc import Sequence

import tokenizers

from scheduler_svc.text.token_tables import VisibleTokens

# How far the text of a token depends on its neighbours to the left, generously.
CONTEXT_TOKENS = 8
# The window is cut back to the context when it is this long: decoding it is the cost of each token.
_MAX_WINDOW_TOKENS = 16
# It is cut in any case when it is this long.
_LONGEST_WINDOW_TOKENS = 64
_MAX_CHARACTER_TOKENS = 4
# Tokens whose text is held back because it ends with U+FFFD: a character of four bytes, generously.
MAX_HELD_TOKENS = 8
_BROKEN = "\ufffd"


class WindowDecoder:
    """Decodes a window of the last tokens again with each new one; the text that was not there before is new.

    Exact where a token's text depends on CONTEXT_TOKENS neighbours at most, and no unfinished character has more than
    MAX_HELD_TOKENS tokens.
    """

    def __init__(self, library: tokenizers.Tokenizer, visible: VisibleTokens) -> None:
        self._library = library
        self._visible = visible
        self._window: list[int] = []
        self._num_held = 0  # of the window's last tokens
        self._given = ""  # text of the window that has been given out

    def prime(self, prompt_ids: Sequence[int]) -> None:
        for token_id in reversed(prompt_ids):
            if self._visible[token_id] is not None:
                self._window.append(token_id)
                if len(self._window) == CONTEXT_TOKENS:
                    break
        self._window.reverse()
        self._given = self._decode(self._window)

    def push(self, ids: Sequence[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in ids if self._visible[token_id] is not None])

    def pending(self) -> str:
        return self.rest().rstrip(_BROKEN)

    def rest(self) -> str:
        return self._new_text(self._decode(self._window)) if self._num_held else ""

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(_BROKEN) and self._num_held < MAX_HELD_TOKENS:
            self._num_held += 1
            return ""
        new_text = self._new_text(text)
        self._num_held = 0
        self._given = self._shortened(text) if len(self._window) > _MAX_WINDOW_TOKENS else text
        return new_text

    def _shortened(self, text: str) -> str:
        """Cut the window back; returns what is then its text."""
        for num_tokens in range(CONTEXT_TOKENS, CONTEXT_TOKENS + _MAX_CHARACTER_TOKENS):
            context = self._window[-num_tokens:]
            context_text = self._decode(context)
            # Not in the middle of a character: the window would be broken for good.
            if text.endswith(context_text) or len(self._window) > _LONGEST_WINDOW_TOKENS:
                self._window = context
                return context_text
        return text

    def _new_text(self, text: str) -> str:
        return text[common_prefix_length(self._given, text) :]

    def _decode(self, ids: list[int]) -> str:
        # Special tokens to be skipped never enter the window.
        return self._library.decode(ids, skip_special_tokens=False)


def common_prefix_length(left: str, right: str) -> int:
    """Characters that both begin with."""
    if right.startswith(left):
        return len(left)
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return min(len(left), len(right))
