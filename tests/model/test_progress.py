"""A start shows how far it has come: bars on a terminal, events elsewhere."""

import io

import pytest
import structlog
from transformers.utils import logging as transformers_logging

from executor_svc.model import progress as module
from executor_svc.model.progress import shown_progress, tracked, transformers_told


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_bars_that_vanish_and_no_events():
    terminal = Terminal()
    with structlog.testing.capture_logs() as events, shown_progress(terminal) as progress:
        assert list(tracked(progress, "packing weights", "abc")) == ["a", "b", "c"]
    assert "packing weights:   0%" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r")
    assert events == []


def test_a_bar_is_gone_where_its_stage_fails():
    terminal = Terminal()

    def fail():
        with shown_progress(terminal) as progress:
            progress("packing weights", 1, 3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert terminal.getvalue().endswith("\r")


def test_elsewhere_a_stage_is_told_of_at_both_ends_and_while_it_lasts(monkeypatch):
    now = iter([0.0, 9.9, 10.1, 15.0, 20.2, 30.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    log = io.StringIO()
    with structlog.testing.capture_logs() as events, shown_progress(log) as progress:
        list(tracked(progress, "warming up", range(5)))
    assert [(event["event"], event.get("done"), event.get("seconds")) for event in events] == [
        ("stage_began", None, None),
        ("stage_goes_on", 2, None),
        ("stage_goes_on", 4, None),
        ("stage_ended", None, 30.0),
    ]
    assert log.getvalue() == ""


def test_transformers_own_bars_become_a_stage_and_come_back():
    told = []
    with transformers_told(lambda *parts: told.append(parts), "loading weights"):
        assert list(transformers_logging.tqdm({"a": 1, "b": 2}.items(), desc="Loading")) == [("a", 1), ("b", 2)]
    assert told == [("loading weights", 0, 2), ("loading weights", 1, 2), ("loading weights", 2, 2)]
    list(transformers_logging.tqdm([1], disable=True))
    assert len(told) == 3
