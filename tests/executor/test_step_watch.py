"""A step that does not end ends the process; one that only takes long does not."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from executor_svc.step_watch import PATIENCE, TICK_S, StepWatch
from tests.executor.client import PlanClient
from tests.executor.oracle import prefill
from tests.processes import Service


def hanging(tmp_path: Path) -> list[str]:
    script = tmp_path / "script.json"
    script.write_text('{"faults": [{"step": 1, "kind": "hang"}]}')
    return ["--simulate-script", str(script)]


def test_a_step_that_does_not_end_ends_the_process_and_says_so(start: Callable[..., Service], tmp_path: Path) -> None:
    executor = start("--step-timeout-s", "0.5", *hanging(tmp_path))
    with PlanClient(executor.address) as client:
        client.attach()
        client.send_plan(prefill())
        assert executor.process.wait(10) == 1
    assert "step_stuck" in executor.log


OWN_SECOND = """
import os, time
from executor_svc.step_watch import StepWatch
watch = StepWatch(2.0, lambda _: os._exit(3))
watch.start()
watch.begin(0.0)
for tenth in range(10):
    time.sleep(0.1)
    if tenth == 5:
        print("under way", flush=True)
"""


def test_time_in_which_the_process_does_not_run_is_not_the_steps() -> None:
    """Frozen for longer than its step may take, it goes on with it, and ends it in time of its own."""
    with subprocess.Popen([sys.executable, "-c", OWN_SECOND], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
        process.send_signal(signal.SIGCONT)
        assert process.wait(20) == 0


@pytest.fixture
def stuck() -> threading.Event:
    return threading.Event()


def test_steps_that_end_are_never_stuck_and_slow_models_get_longer(stuck: threading.Event) -> None:
    watch = StepWatch(4 * TICK_S, lambda _: stuck.set())
    watch.start()
    for _ in range(2):
        watch.begin(0.0)
        assert not stuck.wait(TICK_S)
        watch.end()
    assert not stuck.wait(5 * TICK_S), "no step has begun"
    watch.begin(worst_step_s=TICK_S)
    assert not stuck.wait((PATIENCE - 1) * TICK_S)
    assert stuck.wait(20 * TICK_S)
