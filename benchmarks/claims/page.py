"""Makes docs/claims.md of docs/claims/claims.json: `python -m benchmarks.claims.page`.

The text is that of page.md.jinja; it holds no measured number, so that none can drift from what was measured.
"""

import json
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.claims.blocks import CONTEXT, NUM_ROWS
from benchmarks.claims.prefixes import NUM_REQUESTS, OUTPUT_TOKENS, OWN_TOKENS
from benchmarks.claims.pressure import MEMORY, USUAL
from benchmarks.claims.rates import LOADS
from benchmarks.claims.report import NAMES, PAPER_SHARES, summary
from benchmarks.claims.setting import Figures
from benchmarks.claims.slabs import POLICIES
from benchmarks.claims.throughput import WINDOW_PART

PAGE = Path(__file__).parents[2] / "docs/claims.md"
FIGURES = PAGE.with_suffix("") / "claims.json"
TEMPLATE = Path(__file__).with_name("page.md.jinja")
MIXES = ("long", "short")


def page(figures: Figures) -> str:
    """The whole text. Raises jinja2.UndefinedError where the figures lack one that it names."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATE.parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {"percent": _percent, "fixed": _fixed}
    told: Figures = {"names": NAMES, "policies": list(POLICIES), "mixes": MIXES, "published": PAPER_SHARES}
    told |= {"num_requests": NUM_REQUESTS, "own_tokens": OWN_TOKENS, "output_tokens": OUTPUT_TOKENS}
    told |= {"num_rows": NUM_ROWS, "context": CONTEXT}
    told |= {"window_s": WINDOW_PART * figures["setting"]["window_s"]}
    told |= {"most_load": LOADS[-1], "usual": USUAL, "ratios": summary(figures)}
    here = figures["setting"]["kv_tokens"]
    told |= {"usual_point": usual_point(figures), "bare_point": _point(figures, here, 0.0)}
    told["more_memory"] = [_point(figures, times * here, USUAL) for times in MEMORY if times >= 1]
    told |= {"long_requests": _arriving(figures, "long")}
    return environment.get_template(TEMPLATE.name).render(**figures, **told)


def usual_point(figures: Figures) -> Figures:
    """As it serves: with a prefix cache, the usual share kept free, and the memory of all policies."""
    return _point(figures, figures["setting"]["kv_tokens"], USUAL)


def _point(figures: Figures, kv_tokens: float, watermark: float) -> Figures:
    sought = {"kv_tokens": kv_tokens, "watermark": watermark, "prefix_caching": True}
    return next(point for point in figures["pressure"]["paper"] if sought.items() <= point.items())


def _arriving(figures: Figures, mix: str) -> list[float]:
    """By policy, requests that come within a window of latency at the rate that saturates."""
    window_s, mean_output = figures["setting"]["window_s"], figures["setting"]["mixes"][mix]["mean_output"]
    return [window_s * figures["throughput"][mix][name]["paper_tokens_s"] / mean_output for name in POLICIES]


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def _fixed(value: float, digits: int = 1) -> str:
    return f"{value:,.{digits}f}"


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(FIGURES.read_text())))
