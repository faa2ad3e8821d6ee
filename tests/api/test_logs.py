"""Log lines are events with keys, and hold nothing that a client sent (C10.2)."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys, structlog
from scheduler_svc.logs import configure_logs

configure_logs("info", sys.argv[1])
log = structlog.get_logger()

def serve(prompt):
    raise ValueError("broken")

log.debug("unseen")
log.info("listening", address="127.0.0.1:1")
logging.getLogger("library").info("unseen too")
logging.getLogger("library").warning("seen %s", "here")
try:
    serve("marker" + "-of-a-prompt")
except ValueError as error:
    log.error("call_failed", exc_info=error)
"""


def logged(form: str) -> str:
    done = subprocess.run([sys.executable, "-c", PROGRAM, form], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr


def test_json_is_one_object_a_line() -> None:
    events = [json.loads(line) for line in logged("json").splitlines()]
    assert [event["event"] for event in events] == ["listening", "seen here", "call_failed"]
    assert [event["level"] for event in events] == ["info", "warning", "error"]
    assert events[0]["address"] == "127.0.0.1:1"
    assert "ValueError: broken" in events[2]["exception"]


def test_auto_is_json_where_nobody_watches() -> None:
    assert json.loads(logged("auto").splitlines()[0])["event"] == "listening"


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_traceback_tells_places_but_no_variables(form: str) -> None:
    text = logged(form)
    assert "ValueError: broken" in text
    assert "marker-of-a-prompt" not in text
    assert "unseen" not in text
