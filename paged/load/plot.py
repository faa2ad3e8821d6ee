"""A picture of a load test: how the times are distributed, and tokens second by second. Needs matplotlib."""

from importlib.util import find_spec
from pathlib import Path

from paged.load.report import TIMES
from paged.load.seen import Seen

SUFFIXES = (".svg", ".png")
# Told apart by people who see colours differently (Okabe and Ito).
COLOURS = {"ttft_ms": "#0072B2", "itl_ms": "#E69F00", "latency_ms": "#009E73"}
WIDTH, HEIGHT = 9.0, 3.6


def check_plottable(path: Path) -> None:
    """Raises ValueError, with what to do, where no picture could be written there."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--plot: {path} must end in one of {', '.join(SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise ValueError("--plot: needs matplotlib; run: pip install 'paged-inference[plot]'")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--plot: there is no directory {path.parent}")


def draw(seen: Seen, title: str, path: Path) -> None:
    """SVG or PNG, as the path ends."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    times, tokens = figure.subplots(1, 2)
    figure.suptitle(title)
    given = {"ttft_ms": seen.ttft_s, "itl_ms": seen.gaps_s, "latency_ms": seen.latency_s}
    for name, seconds in given.items():
        if seconds:
            milliseconds = sorted(1e3 * second for second in seconds)
            shares = [(rank + 1) / len(milliseconds) for rank in range(len(milliseconds))]
            times.step(milliseconds, shares, where="post", color=COLOURS[name], label=TIMES[name])
    times.set(xscale="log", xlabel="milliseconds", ylabel="share that took no longer", ylim=(0, 1))
    times.grid(alpha=0.3)
    if times.lines:
        times.legend(loc="upper left")
    whole = seen.tokens_by_second[: int(seen.seconds)]  # not the part of a second at the end
    tokens.bar(range(len(whole)), whole, width=1.0, align="edge", color=COLOURS["ttft_ms"])
    tokens.set(xlabel="second", ylabel="tokens", ylim=(0, None))
    tokens.grid(alpha=0.3)
    figure.savefig(path)
