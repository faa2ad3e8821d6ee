"""How long prompts and outputs are: mixes that are made like two data sets, log-normal with their means."""

import math
import random

SIGMA = 0.8
# Means of prompt and output tokens, of the data sets that the PagedAttention paper uses: Alpaca and ShareGPT.
MIXES = {"short": (19.31, 58.45), "long": (161.31, 337.99)}


def log_normal_length(mean: float, chance: random.Random, longest: int) -> int:
    """Of a log-normal distribution with this mean and SIGMA; at least 1, and at most `longest`."""
    return min(max(round(chance.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA)), 1), longest)
