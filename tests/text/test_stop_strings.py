"""Stop strings end the text at the right character, whatever the pieces: C5.3, C5.5."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.text.stop_strings import StopStringFinder


def cut(pieces: list[str], stops: list[str], include: bool = False) -> tuple[str, str | None]:
    """All text that is delivered, and the stop string found."""
    finder = StopStringFinder(stops, include)
    delivered = ""
    for piece in pieces:
        text, found = finder.push(piece)
        delivered += text
        if found is not None:
            return delivered, found
    return delivered + finder.finish(), None


def naive_cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The rule, word for word: the first to be complete wins; of those that end together, the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


LETTERS = st.text(alphabet="ab😀", max_size=8)


@given(
    pieces=st.lists(LETTERS, max_size=8),
    stops=st.lists(LETTERS.filter(bool), min_size=1, max_size=4),
    include=st.booleans(),
)
@settings(max_examples=1000, deadline=None)
def test_the_text_ends_where_the_first_complete_stop_string_begins(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    assert cut(pieces, stops, include) == naive_cut("".join(pieces), stops, include)


@given(pieces=st.lists(LETTERS, max_size=8), stops=st.lists(LETTERS.filter(bool), min_size=1, max_size=4))
@settings(max_examples=500, deadline=None)
def test_only_what_may_become_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    finder, seen, delivered = StopStringFinder(stops), "", ""
    for piece in pieces:
        seen += piece
        assert finder.would_find(piece) == (naive_cut(seen, stops, False)[1] is not None)
        text, found = finder.push(piece)
        delivered += text
        if found is not None:
            return
        held = seen[len(delivered) :]
        prefixes = {stop[:length] for stop in stops for length in range(1, len(stop))}
        longest = max((prefix for prefix in prefixes if seen.endswith(prefix)), key=len, default="")
        assert held == longest


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "found"),
    [
        (["lm", "no", "p", "qrs", "t", "u"], ["nopqrst", "ZZ"], "lm", "nopqrst"),
        (["no", "pX"], ["nopqrst", "ZZ"], "nopX", None),
        (["aZ", "Zb"], ["nopqrst", "ZZ"], "a", "ZZ"),
        (["xabc"], ["abc", "ab"], "x", "ab"),
        (["xabcd"], ["abcd", "bc"], "xa", "bc"),
        (["aab", "aabaaa"], ["aabaaa"], "aab", "aabaaa"),
        (["aabaaabaaaa"], ["aabaaaa"], "aaba", "aabaaaa"),
        (["ab"], ["abc"], "ab", None),
        (["ten chars."], ["." + "x" * 49], "ten chars.", None),
    ],
)
def test_known_cases(pieces: list[str], stops: list[str], text: str, found: str | None) -> None:
    assert cut(pieces, stops) == (text, found)
    assert cut(list("".join(pieces)), stops) == (text, found)
    assert cut(pieces, stops, include=True) == (text + (found or ""), found)


def test_many_long_stop_strings_are_found() -> None:
    stops = [f"{i:03d}" + "x" * 497 for i in range(20)]
    text = "a" * 1000 + stops[7] + "rest"
    for size in (1, 7, 5000):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert cut(pieces, stops) == ("a" * 1000, stops[7])
