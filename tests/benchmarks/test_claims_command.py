"""What is wrong with the command's arguments is told before anything is measured."""

import sys
from pathlib import Path

import pytest

from benchmarks.claims.__main__ import main
from benchmarks.claims.page import FIGURES


def _told(monkeypatch: pytest.MonkeyPatch, *flags: str) -> object:
    monkeypatch.setattr(sys, "argv", ["benchmarks.claims", *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_memory_for_less_than_the_longest_slab_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _told(monkeypatch, "--kv-tokens", "2047") == 2
    assert "--kv-tokens: is 2047; must be 2048 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reason"), [(None, "No such file"), ("{", "is no JSON"), ('{"setting": 1}', "lacks memory, throughput")]
)
def test_figures_that_are_none_of_ours_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, reason: str
) -> None:
    file = tmp_path / "claims.json"
    if text is not None:
        file.write_text(text)
    told = str(_told(monkeypatch, "--redraw", str(file)))
    assert str(file) in told
    assert reason in told


def test_a_place_that_cannot_be_written_is_told_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "--out: cannot write to" in str(
        _told(monkeypatch, "--redraw", str(FIGURES), "--out", str(tmp_path / "file"))
    )


def test_a_trace_that_cannot_be_read_is_told_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("prompt_tokens,output_tokens\n5,none\n")
    assert "row 1: no numbers" in str(_told(monkeypatch, "--trace", str(trace), "--model", str(tmp_path / "none")))
