"""When memory is given back: once for each load that has come and gone, and never for a few requests."""

from scheduler_svc.high_water import MANY, RECEDED, HighWater


def given_back(*nums_live: int) -> list[int]:
    """The places in which it is."""
    water = HighWater()
    return [place for place, num_live in enumerate(nums_live) if water.has_receded(num_live)]


def test_few_requests_are_not_worth_it():
    assert given_back(0, MANY - 1, 0, MANY - 1, 0) == []


def test_a_load_that_goes_is_worth_it_once():
    assert given_back(MANY, MANY // RECEDED + 1, MANY // RECEDED, 3, 0, 0) == [2]


def test_so_is_each_that_comes_after_it():
    assert given_back(4 * MANY, MANY, MANY - 1, 0, MANY, 0, 0) == [1, 3, 5]
