"""The figures of a load test, for people and for scripts."""

from typing import Any

from paged.load.generator import Load
from paged.load.seen import Seen, spread_ms

TIMES = {
    "ttft_ms": "first token",
    "itl_ms": "between messages",
    "per_token_ms": "per token",
    "latency_ms": "whole answer",
}
TOO_BUSY = 0.9  # of a core: from then on figures are of the client, too


def figures(load: Load, seen: Seen, *, client_cpu_s: float) -> dict[str, Any]:
    """As `paged bench --json` prints them; docs/command_line.md says what they mean."""
    return {
        "load": _asked(load),
        "seconds": round(seen.seconds, 3),
        "requests": {
            "sent": seen.sent,
            "finished": seen.finished,
            "refused": seen.refused,
            "failed": seen.failed,
            "unfinished": seen.unfinished,
            "unsent": seen.unsent,
        },
        "requests_per_s": round(seen.finished / seen.seconds, 2),
        "tokens_per_s": round(seen.tokens / seen.seconds, 1),
        "tokens_per_message": round(seen.tokens / max(seen.messages, 1), 2),
        "ttft_ms": spread_ms(seen.ttft_s),
        "itl_ms": spread_ms(seen.gaps_s),
        "per_token_ms": spread_ms(seen.per_token_s),
        "latency_ms": spread_ms(seen.latency_s),
        "client_cores": round(client_cpu_s / seen.seconds, 2),
    }


def _asked(load: Load) -> dict[str, Any]:
    lengths: dict[str, Any] = {"mix": load.mix}
    if load.mix is None:
        lengths = {"prompt_tokens": list(load.prompt_tokens), "output_tokens": list(load.output_tokens)}
    pace = {"concurrency": load.streams} if load.rate is None else {"rate": load.rate, "max_open": load.streams}
    return {**pace, **lengths, "seed": load.seed}
