"""Random numbers that depend on nothing but what they are for, so that a draw can be repeated anywhere."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

_STEP = np.uint64(0x9E3779B97F4A7C15)  # odd, from the golden ratio: consecutive multiples are far apart
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def random_uniform(seed: ArrayLike, index: ArrayLike, position: ArrayLike) -> NDArray[np.float64]:
    """A number in [0, 1), a multiple of 2**-53, for each (seed, index, position of the token to be drawn).

    Arguments are non-negative integers below 2**64 and broadcast. The hash is the finalizer of SplitMix64 (Steele,
    Lea, Flood: Fast splittable pseudorandom number generators, 2014), once for each of the three.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is meant
        state = _mix(np.asarray(seed, np.uint64) + _STEP)
        state = _mix(state ^ (np.asarray(index, np.uint64) + _STEP) * _STEP)
        state = _mix(state ^ (np.asarray(position, np.uint64) + _STEP) * _STEP)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MULTIPLIERS[0]
    x = (x ^ (x >> np.uint64(27))) * _MULTIPLIERS[1]
    return x ^ (x >> np.uint64(31))
