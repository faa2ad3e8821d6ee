"""Memory that samples and beams of one prompt save by sharing its blocks, as `benchmarks.sharing` counts it."""

from benchmarks.claims.setting import Figures, Setting
from benchmarks.sharing import WIDTHS, saved

# Least and most that the PagedAttention paper saves, by kind and data set; 2 to 6 sequences.
PUBLISHED = {
    "n": {"short": (0.061, 0.098), "long": (0.162, 0.305)},
    "beam": {"short": (0.376, 0.552), "long": (0.443, 0.663)},
}
NUM_REQUESTS, QUICK_NUM_REQUESTS = 100, 10


def measure(setting: Setting) -> Figures:
    """By mix, kind and number of sequences: the share of blocks that is saved; and what was published."""
    count = QUICK_NUM_REQUESTS if setting.quick else NUM_REQUESTS
    figures: Figures = {}
    for mix in setting.mixes:
        figures[mix.name] = {
            kind: {str(width): round(saved(mix.lengths, width, count, beams=kind == "beam"), 4) for width in WIDTHS}
            for kind in PUBLISHED
        }
        setting.say(f"{mix.name}: {figures[mix.name]}")
    return {"saved": figures, "published": PUBLISHED}
