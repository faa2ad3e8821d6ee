"""docs/claims.md says what docs/claims/claims.json holds, which meets the bars; its plots are drawn of the same."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from benchmarks.claims import plots
from benchmarks.claims.page import FIGURES, PAGE, TEMPLATE, page, usual_point
from benchmarks.claims.report import summary

PLOTS = ("memory", "over_time", "ratios", "latency", "blocks", "prefixes", "samples", "pressure")
# Not measured here: the paper's figures and name, and half a block less half a slot.
BY_HAND = {"20 to 40 %", "60 to 80 %", "2309.06180", "7.5"}


@pytest.fixture(scope="module")
def figures() -> Any:
    return json.loads(FIGURES.read_text())


def test_the_page_says_what_was_measured(figures: Any) -> None:
    assert PAGE.read_text() == page(figures), "renew it: python -m benchmarks.claims.page"


def test_no_figure_of_the_page_is_written_by_hand() -> None:
    text = re.sub(r"\{\{.*?\}\}|\{%.*?%\}|```.*?```", "", TEMPLATE.read_text(), flags=re.DOTALL)
    assert set(re.findall(r"\d+ to \d+ %|\d[\d,]* %|\d+\.\d+", text)) == BY_HAND


def test_what_the_page_links_to_is_there() -> None:
    text = PAGE.read_text()
    links = re.findall(r"\]\((?!http)([^)]+)\)", text)
    headings = {
        re.sub(r"[^\w -]", "", line[3:].lower()).replace(" ", "-") for line in text.splitlines() if line[:3] == "## "
    }
    files = [link for link in links if not link.startswith("#")]
    assert {f"claims/{name}.svg" for name in PLOTS} <= set(files)
    assert [link for link in files if not (PAGE.parent / link).is_file()] == []
    assert {link[1:] for link in links if link.startswith("#")} <= headings


def test_plots_are_those_of_the_figures(figures: Any, tmp_path: Path) -> None:
    plots.draw(figures, tmp_path)
    assert sorted(file.stem for file in tmp_path.glob("*.svg")) == sorted(PLOTS)
    for file in sorted(tmp_path.glob("*.svg")):
        (drawn, places), (kept, kept_places) = (_taken_apart(path) for path in (file, FIGURES.parent / file.name))
        assert drawn == kept, file.name
        assert places == pytest.approx(kept_places, abs=0.01), file.name
        pixels, kept_pixels = (imread(path.with_suffix(".png")) for path in (file, FIGURES.parent / file.name))
        assert pixels.shape == kept_pixels.shape, file.name
        assert abs(pixels - kept_pixels).mean() < 0.003, file.name  # letters may differ by a shade


def _taken_apart(svg: Path) -> tuple[str, list[float]]:
    """The text without numbers and without the names of parts, which are digests; and the numbers."""
    number = r"-?\d+\.?\d*"
    text = re.sub(r'(id="|href="#|url\(#)\w+', r"\1", svg.read_text())
    return re.sub(number, "", text), [float(found) for found in re.findall(number, text)]


def test_figures_are_all_of_one_run_and_agree(figures: Any) -> None:
    assert "note" not in figures
    running = figures["memory"]["paged"]["long"]["running"]
    assert running == figures["blocks"]["waste"]["16"]["long"]["running"] == usual_point(figures)["running"]


def test_what_was_measured_meets_the_bars(figures: Any) -> None:
    told, short = summary(figures), figures["memory"]["paged"]["short"]
    assert told["utilisation"]["paged"]["long"] >= 0.96
    assert short["utilisation"] == pytest.approx(short["mean_tokens"] / (short["mean_tokens"] + 7.5), abs=0.01)
    assert min(told["concurrency_ratio"]["slab_max"]["long"], told["throughput_ratio"]["slab_max"]["long"]) >= 2
    assert set(figures["answers"]["differing"].values()) == {0}
    assert figures["seconds"] < 15 * 60
