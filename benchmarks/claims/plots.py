"""The plots of docs/claims.md, from the figures of one run; each as SVG and as PNG."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.claims.memory import CURVE_EVERY
from benchmarks.claims.report import NAMES, PAPER_SHARES
from benchmarks.claims.watched import Occupancy

# Told apart by people who see colours differently (Okabe and Ito), and by their markers.
COLOURS = {"paged": "#0072B2", "slab_max": "#D55E00", "slab_pow2": "#E69F00", "slab_oracle": "#009E73"}
MARKERS = {"paged": "o", "slab_max": "s", "slab_pow2": "^", "slab_oracle": "D"}
KINDS = {
    "tokens": ("hold tokens", "#0072B2"),
    "to_come": ("reserved for tokens to come", "#56B4E9"),
    "never": ("reserved, never used", "#D55E00"),
    "rounding": ("lost to rounding", "#E69F00"),
    "free": ("free", "#DDDDDD"),
}
WIDTH, HEIGHT = 9.0, 3.6
OFF, ON = "#999999", "#0072B2"


def draw(figures: Any, directory: Path) -> None:
    """All of them, into that directory."""
    mpl.rcParams.update({"svg.hashsalt": "claims", "svg.fonttype": "none", "font.size": 9, "axes.grid": True})
    mpl.rcParams.update(
        {"axes.axisbelow": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False}
    )
    plots: dict[str, Callable[[Any, Figure], None]] = {
        "memory": _memory,
        "over_time": _over_time,
        "ratios": _ratios,
        "latency": _latency,
        "blocks": _blocks,
        "prefixes": _prefixes,
        "samples": _samples,
        "pressure": _pressure,
    }
    for name, plot in plots.items():
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        plot(figures, figure)
        figure.savefig(directory / f"{name}.svg", metadata={"Date": None})
        figure.savefig(directory / f"{name}.png", dpi=110, metadata={"Software": None})


def _panels(figure: Figure, count: int, *, sharey: bool = False) -> list[Axes]:
    return list(figure.subplots(1, count, squeeze=False, sharey=sharey)[0])


def _memory(figures: Any, figure: Figure) -> None:
    memory = figures["memory"]
    mixes = list(memory["paged"])[::-1]
    for axes, mix in zip(_panels(figure, len(mixes), sharey=True), mixes, strict=True):
        names = list(memory)[::-1]
        left = [0.0] * len(names)
        for kind in Occupancy.KINDS:
            label, colour = KINDS[kind]
            shares = [100 * memory[name][mix]["shares"][kind] for name in names]
            axes.barh([NAMES[name] for name in names], shares, left=left, color=colour, label=label)
            left = [a + b for a, b in zip(left, shares, strict=True)]
        if mix == "long":
            told = [name for name in names if name in PAPER_SHARES]
            places = [100 * PAPER_SHARES[name] for name in told]
            axes.plot(places, [NAMES[name] for name in told], "k|", markersize=16, label="tokens, in the paper")
        axes.set(xlim=(0, 100), xlabel="% of KV memory", title=f"{mix} mix, at saturation")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=8)


def _over_time(figures: Any, figure: Figure) -> None:
    memory = figures["memory"]
    mixes = list(memory["paged"])[::-1]
    for axes, mix in zip(_panels(figure, len(mixes), sharey=True), mixes, strict=True):
        for name, colour in COLOURS.items():
            curve = memory[name][mix]["curve"]
            steps = [CURVE_EVERY * (i + 1) for i in range(len(curve))]
            axes.plot(steps, [100 * share for share in curve], color=colour, label=NAMES[name], linewidth=1.2)
        axes.set(ylim=(0, 100), xlabel="step, from empty memory", title=f"{mix} mix")
    figure.axes[0].set_ylabel("% of KV memory that holds tokens")
    _legend(figure)


def _ratios(figures: Any, figure: Figure) -> None:
    throughput, memory = figures["throughput"], figures["memory"]
    mixes = list(throughput)[::-1]
    panels = _panels(figure, 2)
    for axes, title in zip(panels, ("sequences that run", "output tokens/s, real model"), strict=True):
        for j, name in enumerate(COLOURS):
            values = [
                memory[name][mix]["running"] if axes is panels[0] else throughput[mix][name]["tokens_s"]
                for mix in mixes
            ]
            places = [i + 0.2 * (j - 1.5) for i in range(len(mixes))]
            bars = axes.bar(places, values, 0.19, color=COLOURS[name], label=NAMES[name])
            axes.bar_label(bars, [f"{value:.3g}" if value < 10 else f"{value:.0f}" for value in values], fontsize=8)
        axes.set_xticks(range(len(mixes)), [f"{mix} mix" for mix in mixes])
        axes.set_title(f"{title}, at equal KV memory")
        axes.margins(y=0.1)
        axes.grid(axis="x", visible=False)
    _legend(figure)


def _latency(figures: Any, figure: Figure) -> None:
    rates = figures["rates"]
    figure.set_figheight(HEIGHT * len(rates))
    rows = figure.subplots(len(rates), 3, squeeze=False)
    for (first, between, output), mix in zip(rows, list(rates)[::-1], strict=True):
        told = ((first, "first_token_p50_s"), (between, "between_tokens_p50_s"), (output, "tokens_s"))
        for axes, key in told:
            for name, colour in COLOURS.items():
                _curve_and_points(axes, rates[mix][name], key, name, colour)
            axes.set(xlabel="requests/s", xlim=(0, None))
        first.set(yscale="log", ylabel="s, median", title=f"to the first token, {mix} mix")
        between.set(ylim=(0, None), ylabel="s, median", title=f"between tokens, {mix} mix")
        output.set(ylim=(0, None), ylabel="output tokens/s", title=f"tokens a second, {mix} mix")
    _legend(figure, "lines: on paper; points: served")


def _curve_and_points(axes: Axes, rates: Any, key: str, name: str, colour: str) -> None:
    """What was found on paper, and what was served."""
    curve = [(point["rate"], point[key]) for point in rates["paper"] if point[key] is not None]
    points = [(point["rate"], point[key]) for point in rates["served"] if point[key] is not None]
    axes.plot(*zip(*curve, strict=True), color=colour, label=NAMES[name], linewidth=1.2)
    if points:
        axes.plot(*zip(*points, strict=True), MARKERS[name], color=colour, markersize=6)


def _blocks(figures: Any, figure: Figure) -> None:
    waste, speed = figures["blocks"]["waste"], figures["blocks"]["speed"]
    sizes = [int(size) for size in waste]
    memory, kernels = _panels(figure, 2)
    for mix, colour in zip(waste["16"], (OFF, ON), strict=False):
        shares = [100 * waste[str(size)][mix]["utilisation"] for size in sizes]
        memory.plot(sizes, shares, "o-", color=colour, label=f"{mix} mix")
    memory.set(ylabel="% of allocated memory that holds tokens", ylim=(0, 102))
    memory.legend(frameon=False)
    for is_native, marker, label in ((True, "o", "native kernels"), (False, "x", "reference (plain torch)")):
        chosen = [size for size in sizes if (speed[str(size)]["kernels"] != "reference") == is_native]
        if chosen:
            times = [speed[str(size)]["time_over_16"] for size in chosen]
            kernels.plot(chosen, times, marker, color=ON if is_native else OFF, label=label)
    kernels.axhline(1, color="black", linewidth=0.6)
    kernels.set(ylabel="attention: time over blocks of 16", yscale="log", ylim=(0.5, 200))
    kernels.legend(frameon=False)
    for axes in (memory, kernels):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xlabel("slots of a block")


def _prefixes(figures: Any, figure: Figure) -> None:
    found = figures["prefixes"]
    lengths = [int(length) for length in found]
    panels = _panels(figure, 3)
    told = (
        ("seconds", "s for all requests"),
        ("first_token_p50_s", "s to first token, median"),
        ("blocks", "blocks held, most"),
    )
    for axes, (key, label) in zip(panels, told, strict=True):
        for which, colour in (("off", OFF), ("on", ON)):
            axes.plot(
                lengths, [found[str(n)][which][key] for n in lengths], "o-", color=colour, label=f"sharing {which}"
            )
        axes.set(xlabel="tokens of the system prompt", ylabel=label, ylim=(0, None))
    _legend(figure)


def _samples(figures: Any, figure: Figure) -> None:
    saved, published = figures["samples"]["saved"], figures["samples"]["published"]
    titles = {"n": "parallel samples", "beam": "beams"}
    for axes, kind in zip(_panels(figure, 2, sharey=True), titles, strict=True):
        for mix, colour in zip(saved, (OFF, ON), strict=False):
            shares = {int(width): 100 * share for width, share in saved[mix][kind].items()}
            axes.plot(list(shares), list(shares.values()), "o-", color=colour, label=f"{mix} mix")
            if mix in published[kind]:
                low, high = published[kind][mix]
                axes.axhspan(100 * low, 100 * high, color=colour, alpha=0.15, label=f"paper, {mix}")
            axes.set_xticks(list(shares))
        axes.set(xlabel="sequences of a request", title=titles[kind], ylim=(0, 100))
    figure.axes[0].set_ylabel("% of blocks saved")
    _legend(figure)


def _pressure(figures: Any, figure: Figure) -> None:
    points = figures["pressure"]["paper"]
    told = (
        ("preemptions_per_100", 1, "preemptions per 100 requests"),
        ("computed_again", 100, "% computed once more"),
        ("tokens_s", 1, "output tokens/s, on paper"),
    )
    sizes = sorted({point["kv_tokens"] for point in points})
    kept = sorted({(point["watermark"], not point["prefix_caching"]) for point in points})
    shades = mpl.colormaps["viridis"].resampled(len(kept) + 1)
    for axes, (key, factor, label) in zip(_panels(figure, 3), told, strict=True):
        for i, (watermark, no_cache) in enumerate(kept):
            chosen = [p for p in points if (p["watermark"], not p["prefix_caching"]) == (watermark, no_cache)]
            name = f"{watermark:.0%} kept free" + (", no prefix cache" if no_cache else "")
            style, values = "--" if no_cache else "-", [factor * point[key] for point in chosen]
            axes.plot(sizes, values, style, marker="o", markersize=4, color=shades(i), label=name)
        axes.set(xlabel="slots of KV memory", ylabel=label, xscale="log", ylim=(0, None))
        axes.set_xticks(sizes, [f"{size // 1024}k" for size in sizes])
        axes.minorticks_off()
    _legend(figure)


def _legend(figure: Figure, title: str | None = None) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8, title=title
    )
