"""How a model's makers would have its tokens drawn: what generation_config.json says of sampling."""

import math
import struct
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
    stated = {name: value for name in _RANGES if (value := _as_sent(config.get(name))) is not None}
    kept = {name: value for name, value in stated.items() if _is_within(value, *_RANGES[name])}
    if config.get("do_sample") is False:
        kept = {name: value for name, value in kept.items() if name == "repetition_penalty"} | {"temperature": 0.0}
    return kept


def _as_sent(value: Any) -> float | None:
    """The float32 that a message makes of it: what is above 0 in the file may be 0 there. None for what is none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        (sent,) = struct.unpack("<f", struct.pack("<f", value))
    except (OverflowError, struct.error):  # floats and whole numbers that are too large
        return None
    return sent if math.isfinite(sent) else None


def _is_within(value: float, lowest: float, highest: float, closed: bool) -> bool:
    return lowest <= value <= highest and (closed or value > lowest)
