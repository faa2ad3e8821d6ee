"""Shares are by demand, with a floor for each, and the same for all who want more than there is for them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_svc.shares import fair_shares


@pytest.mark.parametrize(
    ("total", "wants", "floors", "shares"),
    [
        (100, [100], [1], [100]),
        (100, [0], [0], [100]),
        (100, [100, 100], [1, 1], [50, 50]),
        (100, [10, 100], [1, 1], [10, 90]),
        (100, [10, 30], [1, 1], [40, 60]),
        (100, [100, 0, 0], [5, 5, 5], [90, 5, 5]),
        (101, [100, 100, 3], [1, 1, 1], [49, 49, 3]),
        (100, [100, 100, 3], [1, 1, 1], [49, 48, 3]),
        (10, [10, 10], [8, 1], [8, 2]),
        (10, [10, 10], [10, 0], [10, 0]),
        (0, [5, 5], [0, 0], [0, 0]),
    ],
)
def test_a_share_is_what_is_wanted_up_to_a_level(
    total: int, wants: list[int], floors: list[int], shares: list[int]
) -> None:
    assert fair_shares(total, wants, floors) == shares


def test_floors_that_are_more_than_there_is_are_refused() -> None:
    with pytest.raises(ValueError, match="11"):
        fair_shares(10, [1, 1], [10, 1])


parties = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9)), min_size=1, max_size=9)


@given(total=st.integers(90, 1000), parties=parties)
def test_nobody_could_get_more_without_taking_it_from_one_who_has_no_more(
    total: int, parties: list[tuple[int, int]]
) -> None:
    wants, floors = [want for want, _ in parties], [floor for _, floor in parties]
    shares = fair_shares(total, wants, floors)
    assert sum(shares) == total
    assert all(share >= floor for share, floor in zip(shares, floors, strict=True))
    short = [share for share, want in zip(shares, wants, strict=True) if share < want]
    if short:
        above = zip(shares, floors, strict=True)
        assert all(share <= min(short) + 1 for share, floor in above if share > floor)
        assert all(share <= max(want, floor) for share, want, floor in zip(shares, wants, floors, strict=True))
