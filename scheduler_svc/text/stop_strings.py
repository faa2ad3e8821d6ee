"""Finding stop strings in a text that comes in pieces, and holding back what may become one."""

import re
from collections.abc import Sequence
from typing import NamedTuple


class Scan(NamedTuple):
    """`text` may be delivered now. `stop_string` is what was found, and nothing after it counts."""

    text: str
    stop_string: str | None = None


class StopStringFinder:
    """Finds the stop string that is complete first; of those that end with the same character, the longest.

    So the result depends on the text alone, not on how it is cut into pieces: `ab` wins over `abc`, and in `abcd` the
    stop string `bc` wins over `abcd`. Text is held back only while its end is the beginning of a stop string. The
    work is a few steps for each new character and stop string, however long either is.
    """

    def __init__(self, stop_strings: Sequence[str], include_in_text: bool = False) -> None:
        """At least one, none of them empty."""
        # The longest first: it is to win among those that end together.
        longest_first = sorted(set(stop_strings), key=len, reverse=True)
        self._matchers = [_Matcher(stop_string) for stop_string in longest_first]
        self._include_in_text = include_in_text
        self._held = ""
        first_characters = "".join(sorted({stop_string[0] for stop_string in stop_strings}))
        self._find_first_character = re.compile(f"[{re.escape(first_characters)}]").search

    def push(self, text: str) -> Scan:
        """Look at the next piece. After a stop string has been found there is nothing more to push."""
        if not self._held and not self._find_first_character(text):
            return Scan(text)
        found = self._advance(text)
        total = self._held + text
        if found is not None:
            end, stop_string = found
            end += len(self._held)
            self._held = ""
            return Scan(total[: end if self._include_in_text else end - len(stop_string)], stop_string)
        num_held = max(matcher.num_matched for matcher in self._matchers)
        self._held = total[len(total) - num_held :]
        return Scan(total[: len(total) - num_held])

    def would_find(self, text: str) -> bool:
        """Whether `push(text)` would find a stop string. Changes nothing."""
        if not self._held and not self._find_first_character(text):
            return False
        before = [matcher.num_matched for matcher in self._matchers]
        found = self._advance(text)
        for matcher, num_matched in zip(self._matchers, before, strict=True):
            matcher.num_matched = num_matched
        return found is not None

    def finish(self) -> str:
        """The text that is still held back, when nothing follows."""
        text, self._held = self._held, ""
        return text

    def _advance(self, text: str) -> tuple[int, str] | None:
        """Move all matchers over the text, up to the first that is complete: where in the text it ends, and which."""
        for i, character in enumerate(text):
            found = None
            for matcher in self._matchers:
                if matcher.advance(character) and found is None:
                    found = matcher.stop_string
            if found is not None:
                return i + 1, found
        return None


class _Matcher:
    """Knuth, Morris and Pratt's automaton for one stop string; its table grows only as far as the text matches."""

    __slots__ = ("_borders", "num_matched", "stop_string")

    def __init__(self, stop_string: str) -> None:
        self.stop_string = stop_string
        self.num_matched = 0  # characters at the end of the text that begin the stop string
        self._borders = [0, 0]  # [n]: longest proper prefix of the first n characters that is also their suffix

    def advance(self, character: str) -> bool:
        """Whether the stop string is complete with this character."""
        stop_string, matched = self.stop_string, self.num_matched
        while matched and stop_string[matched] != character:
            matched = self._borders[matched]
        if stop_string[matched] == character:
            matched += 1
            if matched == len(self._borders):
                self._borders.append(self._border(matched))
        if matched == len(stop_string):
            self.num_matched = self._borders[matched]
            return True
        self.num_matched = matched
        return False

    def _border(self, length: int) -> int:
        last = self.stop_string[length - 1]
        border = self._borders[length - 1]
        while border and self.stop_string[border] != last:
            border = self._borders[border]
        return border + 1 if self.stop_string[border] == last else 0
