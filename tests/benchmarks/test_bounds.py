"""A benchmark that has bounds says which of them it misses, and ends so that whoever has started it knows."""

import json
import math

import pytest

from benchmarks import overload, recovery
from benchmarks.bounds import missed, tell

KEPT = {"delay_s": 1.0, "ratios": [0.9, 1.5], "seen": 7}
MOST = {"delay_s": 1.0, "ratios": 1.5}


@pytest.mark.parametrize(
    ("found", "names"),
    [
        ({}, []),
        ({"delay_s": 1.001}, ["delay_s"]),
        ({"ratios": [1.6, 0.9]}, ["ratios"]),
        ({"ratios": [0.9, 1.6], "delay_s": math.nan}, ["delay_s", "ratios"]),
        ({"seen": 1e9}, []),
    ],
)
@pytest.mark.parametrize("as_json", [True, False])
def test_a_figure_above_its_bound_is_named_and_fails(
    found: dict, names: list[str], as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert missed(KEPT | found, MOST) == names
    assert tell(KEPT | found, MOST, as_json=as_json) == (1 if names else 0)
    told = capsys.readouterr().out
    if as_json:
        assert json.loads(told)["missed"] == names
        assert json.loads(told)["bounds"] == MOST
    else:
        assert [line.split()[0] for line in told.splitlines() if "MISSED" in line] == names


def test_what_was_promised_of_overload_and_recovery_is_what_they_are_judged_by() -> None:
    assert recovery.BOUNDS == {"recovery_max_s": 1.0, "freeze_overrun_max_s": 1.0}
    assert overload.BOUNDS["latency_ratio"] == 1.5
    assert overload.BOUNDS["refusal_ms"] == 50.0
