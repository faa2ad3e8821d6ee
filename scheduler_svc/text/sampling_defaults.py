"""How a model's makers would have its tokens drawn: what generation_config.json says of sampling."""

import math
from typing import Any

# As in SamplingParams: lowest and highest value, and whether the lowest is one.
_RANGES = {
    "temperature": (0.0, 100.0, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "repetition_penalty": (0.125, 10.0, True),
    "top_k": (0.0, float(1 << 31), True),
}


def sampling_defaults(config: dict[str, Any]) -> dict[str, float]:
    """Values by their names in SamplingParams, of those that the file states and a request may have.

    As transformers reads it: with `do_sample` false, which has to be stated, the most likely token is taken, and what
    is said of filters means nothing.
    """
    stated = {name: config[name] for name in _RANGES if _is_number(config.get(name))}
    kept = {name: float(value) for name, value in stated.items() if _is_within(value, *_RANGES[name])}
    if config.get("do_sample") is False:
        kept = {name: value for name, value in kept.items() if name == "repetition_penalty"} | {"temperature": 0.0}
    return kept


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_within(value: float, lowest: float, highest: float, closed: bool) -> bool:
    return lowest <= value <= highest and (closed or value > lowest)
