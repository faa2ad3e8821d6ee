"""How much of what there is each one gets: what it wants, and the same for all who want more than there is for them."""

from collections.abc import Sequence


def fair_shares(total: int, wants: Sequence[int], floors: Sequence[int]) -> list[int]:
    """Shares that add up to `total`, in the order of `wants`.

    Nobody gets less than its floor. If all that is wanted is there, the rest is dealt out evenly; else there is a
    level, the same for all, and who wants more than that gets that much (the first ones one more, where it does not
    come out even). Raises ValueError where the floors alone are more than `total`.
    """
    if sum(floors) > total:
        raise ValueError(f"floors add up to {sum(floors)}, there are {total}")
    most = max(wants, default=0)
    level = _highest_level(total, wants, floors, most)
    shares = _at(level, wants, floors)
    left = total - sum(shares)
    if level == most:
        each, more = divmod(left, len(shares)) if shares else (0, 0)
        return [share + each + (i < more) for i, share in enumerate(shares)]
    for i, want in enumerate(wants):
        if left and want > level >= floors[i]:
            shares[i] += 1
            left -= 1
    return shares


def _at(level: int, wants: Sequence[int], floors: Sequence[int]) -> list[int]:
    return [max(floor, min(want, level)) for want, floor in zip(wants, floors, strict=True)]


def _highest_level(total: int, wants: Sequence[int], floors: Sequence[int], most: int) -> int:
    """At which no more is given than there is; `most` if that is enough for all."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if sum(_at(middle, wants, floors)) <= total:
            low = middle
        else:
            high = middle - 1
    return low
