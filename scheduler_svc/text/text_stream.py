"""What a client gets to read of one sequence: detokenized, and ended by the first stop string."""

from collections.abc import Sequence
from typing import NamedTuple

from scheduler_svc.text.detokenizer import Detokenizer, Pushed
from scheduler_svc.text.stop_strings import Scan, StopStringFinder
from scheduler_svc.text.tokenizer import Tokenizer


class TextPiece(NamedTuple):
    """Text that can be delivered.

    With `stop_string` the answer is over, and only the first `num_tokens_used` of the tokens just pushed belong to
    it: the last of them completed the stop string.
    """

    text: str
    stop_string: str | None = None
    num_tokens_used: int = 0


class TextStream:
    """Takes a sequence's output tokens, in groups of any size, and gives its text.

    Stop strings are looked for in the text of the tokens after the first `min_tokens` alone; one that begins before
    does not count. A stop string ends the text as soon as the token that completes it is there, even where
    the detokenizer would wait for the next token to be sure of a character.
    """

    __slots__ = (
        "_detokenizer",
        "_finder",
        "_num_unsearched",
        "_num_unsearched_chars",
        "_stop_string",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stop_strings: Sequence[str] = (),
        include_stop_string: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special_tokens)
        self._finder = StopStringFinder(stop_strings, include_stop_string) if stop_strings else None
        self._num_unsearched = min_tokens  # tokens still to come in whose text no stop string is looked for
        self._num_unsearched_chars = 0  # characters of such tokens that the detokenizer still holds
        self._stop_string: str | None = None

    @property
    def plain(self) -> Pushed:
        """What gives the text alone, as `push` does, where there are no stop strings."""
        return self._detokenizer.quickest

    @property
    def can_stop(self) -> bool:
        """Whether there are stop strings."""
        return self._finder is not None

    def push(self, ids: Sequence[int]) -> TextPiece:
        """The text that has become deliverable. After a stop string, no further token is used."""
        if self._finder is None:
            return TextPiece(self._detokenizer.push(ids), None, len(ids))
        if self._stop_string is not None:
            return TextPiece("", self._stop_string, 0)
        num_used = min(self._num_unsearched, len(ids))
        texts = [self._push_unsearched(ids[:num_used])] if num_used else []
        for token_id in ids[num_used:]:
            num_used += 1
            text, stop_string = self._push_searched(self._finder, token_id)
            texts.append(text)
            if stop_string is not None:
                self._stop_string = stop_string
                break
        return TextPiece("".join(texts), self._stop_string, num_used)

    def finish(self) -> TextPiece:
        """The text that was held back, when no token follows. Call once, last; a stop string can still turn up."""
        if self._stop_string is not None:
            return TextPiece("", self._stop_string)
        text = self._detokenizer.finish()
        if self._finder is None or self._num_unsearched:
            return TextPiece(text)
        text, self._stop_string = self._search(self._finder, text)
        return TextPiece(text + self._finder.finish(), self._stop_string)

    def _push_unsearched(self, ids: Sequence[int]) -> str:
        text = self._detokenizer.push(ids)
        self._num_unsearched -= len(ids)
        if not self._num_unsearched:
            self._num_unsearched_chars = len(self._detokenizer.pending())
        return text

    def _push_searched(self, finder: StopStringFinder, token_id: int) -> Scan:
        text = self._detokenizer.push((token_id,))
        text, stop_string = self._search(finder, text)
        if stop_string is not None:
            return Scan(text, stop_string)
        pending = self._detokenizer.pending()
        unsearched, pending = pending[: self._num_unsearched_chars], pending[self._num_unsearched_chars :]
        if pending and finder.would_find(pending):
            # The answer ends with this token, so nothing can break these characters any more.
            rest = finder.push(pending)
            return Scan(text + unsearched + rest.text, rest.stop_string)
        return Scan(text)

    def _search(self, finder: StopStringFinder, text: str) -> Scan:
        if not self._num_unsearched_chars or not text:
            return finder.push(text)
        unsearched, text = text[: self._num_unsearched_chars], text[self._num_unsearched_chars :]
        self._num_unsearched_chars = 0
        text, stop_string = finder.push(text)
        return Scan(unsearched + text, stop_string)
