"""The text of one sequence, as its tokens come."""

from collections.abc import Sequence
from typing import Protocol

from scheduler_svc.text.tokenizer import Tokenizer
from scheduler_svc.text.window_decoder import common_prefix_length


class Pushed(Protocol):
    """What takes tokens, and gives the text that they make final."""

    def push(self, ids: Sequence[int]) -> str: ...


class Detokenizer:
    """Turns a sequence's output tokens into text that never has to be taken back.

    The rule: with `whole = decode(prompt + output)`, all that `push` and `finish` return, joined, is `whole` without
    what it has in common with the beginning of `decode(prompt)`. So it does not depend on how the tokens are
    grouped, a character whose first bytes are in the prompt belongs to the output, and U+FFFD appears only where
    `decode` gives it. (Where a run of `<0x..>` tokens breaks after more than MAX_HELD_BYTES, `decode` would take back
    characters that were good when they were delivered; here they stay.)
    """

    __slots__ = ("_decoder", "_text_of_prompt")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._decoder = tokenizer.new_decoder(skip_special_tokens)
        self._decoder.prime(prompt_ids)
        self._text_of_prompt = self._decoder.rest()  # text that the decoder holds and decode(prompt) has as well

    def push(self, ids: Sequence[int]) -> str:
        """The text that has become final with these tokens."""
        text = self._decoder.push(ids)
        if self._text_of_prompt and text:
            text = self._beyond_prompt(text)
            self._text_of_prompt = ""
        return text

    @property
    def quickest(self) -> Pushed:
        """Whose `push` is the same, without a look at the prompt where that leaves nothing to look at."""
        return self if self._text_of_prompt else self._decoder

    def pending(self) -> str:
        """Finished characters that are held back because the next token could still break them. Mostly empty."""
        return self._beyond_prompt(self._decoder.pending())

    def finish(self) -> str:
        """The rest, as `decode` gives it where nothing follows. Call once, last."""
        return self._beyond_prompt(self._decoder.rest())

    def _beyond_prompt(self, text: str) -> str:
        return text[common_prefix_length(self._text_of_prompt, text) :]
