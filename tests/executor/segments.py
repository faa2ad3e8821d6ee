"""What rows share, found by comparing all of their tables."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from executor_svc.step import SharedSegments

Segment = tuple[int, int, frozenset[int]]  # first place, end, places of its rows in the step


def num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def naive_segments(
    tables: Mapping[int, Sequence[int]],
    rows: Sequence[int],
    num_tokens: Sequence[int],
    context_lens: Sequence[int],
    *,
    block_size: int,
    min_saved: int,
) -> set[Segment]:
    """`tables` has those of all rows that live; the others are columns of a step. `min_saved` is in tokens a row."""

    def shares_what_is_full(place: int) -> bool:
        row = rows[place]
        shared = max((num_equal(tables[row], tables[other]) for other in tables if other != row), default=0)
        return num_tokens[place] == 1 and shared <= (context_lens[place] - 1) // block_size

    places = [place for place in range(len(rows)) if shares_what_is_full(place)]
    return set(_below({place: tables[rows[place]] for place in places}, 0, 0, min_saved / block_size))


def _below(tables: Mapping[int, Sequence[int]], place: int, begin: int, min_saved: float) -> Iterator[Segment]:
    """Of rows with the same blocks before `place`, of which those from `begin` on are in no segment yet."""
    for block in {table[place] for table in tables.values() if len(table) > place}:
        some = {row: table for row, table in tables.items() if len(table) > place and table[place] == block}
        if len(some) < 2:
            continue
        first, *others = some.values()
        end = min(num_equal(first, other) for other in others)
        if worth_it := (len(some) - 1) * (end - begin) >= min_saved * len(some):
            yield begin, end, frozenset(some)
        yield from _below(some, end, end if worth_it else begin, min_saved)


def as_set(segments: SharedSegments | None) -> set[Segment]:
    if segments is None:
        return set()
    starts = segments.row_start.tolist()
    members = [frozenset(segments.rows[begin:end].tolist()) for begin, end in itertools.pairwise(starts)]
    return set(zip(segments.first.tolist(), segments.end.tolist(), members, strict=True))


def assert_tiled(segments: SharedSegments, num_rows: int) -> None:
    """Each row's segments follow each other without a gap, in order, up to where its own blocks begin."""
    covered = [0] * num_rows
    starts = segments.row_start.tolist()
    assert starts[-1] == len(segments.rows)
    for i, (first, end) in enumerate(zip(segments.first.tolist(), segments.end.tolist(), strict=True)):
        assert first < end
        members = segments.rows[starts[i] : starts[i + 1]].tolist()
        assert len(set(members)) == len(members) >= 2
        for row in members:
            assert covered[row] == first
            covered[row] = end
    assert segments.own_start.tolist() == covered
