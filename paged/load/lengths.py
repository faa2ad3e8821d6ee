"""How long prompts and outputs are: drawn evenly from ranges, or from mixes that are made like two data sets."""

import math
import random
from enum import StrEnum

SIGMA = 0.8


class Mix(StrEnum):
    SHORT = "short"  # as Alpaca
    LONG = "long"  # as ShareGPT


# Means of prompt and output tokens, of the data sets that the PagedAttention paper uses. Lengths are log-normal.
MIXES = {Mix.SHORT.value: (19.31, 58.45), Mix.LONG.value: (161.31, 337.99)}


def log_normal_length(mean: float, chance: random.Random, longest: int) -> int:
    """Of a log-normal distribution with this mean and SIGMA; at least 1, and at most `longest`."""
    return min(max(round(chance.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA)), 1), longest)


def mixed_lengths(mix: Mix, chance: random.Random, longest: int) -> tuple[int, int]:
    """Tokens of a prompt and of its output, of one of MIXES; together at most `longest`, which is at least 2."""
    mean_prompt, mean_output = MIXES[mix]
    num_prompt = log_normal_length(mean_prompt, chance, longest - 1)
    return num_prompt, log_normal_length(mean_output, chance, longest - num_prompt)
