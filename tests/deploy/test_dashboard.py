"""The dashboard can be read: each number has a unit, each line a name, each panel its place."""

import json
import re
from itertools import combinations
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import ROOT
from tests.docs.pages import blocks

BOARD = json.loads((ROOT / "deploy/grafana/dashboards/paged.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
UNITS = {"short", "s", "bytes", "percentunit", "reqps"}

each = pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])


def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
    place = panel["gridPos"]
    return {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}


@each
def test_a_panel_has_a_unit_and_each_of_its_lines_a_name(panel: dict[str, Any]) -> None:
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert [target["refId"] for target in panel["targets"]] == list("ABCDEF"[: len(panel["targets"])])
    if panel["type"] == "timeseries":
        names = [target["legendFormat"] for target in panel["targets"]]
        assert all(names)
        assert len(set(names)) == len(names)


@each
def test_a_line_is_told_by_what_its_query_keeps_apart(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        for label in ("ended", "state", "cause", "phase", "instance", "executor", "job"):
            if f"{{{{{label}}}}}" in target.get("legendFormat", ""):
                assert label in target["expr"].partition(" by (")[2].partition(")")[0]


@each
def test_no_number_turns_red_because_it_is_above_80(panel: dict[str, Any]) -> None:
    """Grafana's thresholds where a panel has none."""
    defaults = panel["fieldConfig"]["defaults"]
    if panel["type"] == "stat":
        assert defaults["color"]["mode"] == "fixed" or defaults["thresholds"]["steps"]


def test_panels_have_an_id_and_a_place_of_their_own() -> None:
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    for one, other in combinations(BOARD["panels"], 2):
        assert not cells(one) & cells(other), (one["title"], other["title"])
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in BOARD["panels"])


def test_jobs_have_the_names_that_are_asked_for() -> None:
    asked = {
        job for panel in PANELS for target in panel["targets"] for job in re.findall(r'job="(.*?)"', target["expr"])
    }
    (example,) = [block.text for block in blocks("docs/operations.md") if block.language == "yaml"]
    for config in (example, (ROOT / "deploy/prometheus/prometheus.yml").read_text()):
        jobs = {job["job_name"] for job in yaml.safe_load(config)["scrape_configs"]}
        assert asked <= jobs == {"paged-scheduler", "paged-executor"}


def test_all_is_asked_of_the_provisioned_source() -> None:
    provisioned = (ROOT / "deploy/grafana/provisioning/datasources/prometheus.yaml").read_text()
    source = {"type": "prometheus", "uid": "prometheus"}
    assert f"uid: {source['uid']}\n" in provisioned
    asking = [*PANELS, *(target for panel in PANELS for target in panel["targets"]), *BOARD["templating"]["list"]]
    assert all(one["datasource"] == source for one in asking)
