"""A turn of the loop that does not end ends the process, whatever hangs besides; one that only takes long does not."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from executor_svc.recording.files import read_recording
from executor_svc.turn_watch import PATIENCE, TICK_S, TurnWatch
from tests.executor.client import PlanClient
from tests.executor.conftest import SIMULATED
from tests.executor.oracle import prefill
from tests.processes import Service, start_executor, wait_for

ENDS_WITHIN_S = 60.0


def hanging(tmp_path: Path) -> list[str]:
    script = tmp_path / "script.json"
    script.write_text('{"faults": [{"step": 1, "kind": "hang"}]}')
    return ["--step-timeout-s", "0.5", "--simulate-script", str(script)]


def hang(executor: Service) -> None:
    """Have it begin the step that never ends."""
    with PlanClient(executor.address) as client:
        client.attach()
        client.send_plan(prefill())
        assert executor.process.wait(ENDS_WITHIN_S) == 1


def test_a_step_that_does_not_end_ends_the_process_and_says_so(start: Callable[..., Service], tmp_path: Path) -> None:
    executor = start(*hanging(tmp_path))
    hang(executor)
    assert "step_stuck" in executor.log


# A program for `python -c`: the executor, but for one function, which waits for a reader of a FIFO that has none.
CHANGED = """
import os, runpy, sys
def hang(*_, **__):
    os.open({fifo!r}, os.O_WRONLY)
{change}
sys.argv[:3] = ["executor"]
runpy.run_module("executor_svc", run_name="__main__")
"""


# And it is not waited for as long as by those who want their recording.
HANGING_DISK = """
from types import SimpleNamespace
from executor_svc import service
from executor_svc.recording import files
service.LAST_WORDS_S = 1.0
files.tempfile = SimpleNamespace(mkstemp=hang)
"""


@pytest.fixture
def start_changed(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """`start_changed(change, *flags)`."""
    os.mkfifo(tmp_path / "fifo")
    started: list[Service] = []

    def start_one(change: str, *flags: str) -> Service:
        program = CHANGED.format(fifo=str(tmp_path / "fifo"), change=change)
        started.append(start_executor(tmp_path, *SIMULATED, *flags, launcher=["-c", program]))
        return started[-1].wait_until_ready()

    yield start_one
    for service in started:
        service.kill()


def test_a_step_that_does_not_end_ends_the_process_although_its_recording_cannot_be_written(
    start_changed: Callable[..., Service], tmp_path: Path
) -> None:
    recordings = ["--record-dir", str(tmp_path / "recordings")]
    executor = start_changed(HANGING_DISK, *hanging(tmp_path), *recordings)
    hang(executor)
    assert "step_stuck" in executor.log
    assert "recording_" not in executor.log, "it was not kept from it"


def test_a_step_that_does_not_end_ends_the_process_although_its_recording_cannot_be_made(
    start_changed: Callable[..., Service], tmp_path: Path
) -> None:
    change = "from executor_svc.recording import recorder; recorder._messages = lambda *_: iter([None])"
    executor = start_changed(change, *hanging(tmp_path), "--record-dir", str(tmp_path / "recordings"))
    hang(executor)
    assert "recording_not_written" in executor.log
    assert list((tmp_path / "recordings").iterdir()) == []


def test_a_turn_that_hangs_outside_of_its_step_ends_the_process(
    start_changed: Callable[..., Service], tmp_path: Path
) -> None:
    change = "from executor_svc.simulated.runner import SimulatedRunner; SimulatedRunner.end_rows = hang"
    recordings = tmp_path / "recordings"
    executor = start_changed(change, "--step-timeout-s", "0.5", "--record-dir", str(recordings))
    with PlanClient(executor.address) as client:
        client.attach()
        client.run(prefill())
        client.detach()
        assert executor.process.wait(ENDS_WITHIN_S) == 1
    assert "turn_stuck" in executor.log
    (file,) = recordings.iterdir()
    assert "not its step" in read_recording(file)[0].reason


def test_an_executor_whose_log_nobody_takes_ends_although_it_cannot_say_why(tmp_path: Path) -> None:
    """Its loop hangs in a line of the log, and its last words do so, too."""
    address = tmp_path / "executor"
    flags = ["--endpoint", "tcp://127.0.0.1:0", "--endpoint-file", str(address), "--step-timeout-s", "0.5"]
    command = [sys.executable, "-m", "executor_svc", *SIMULATED, *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
        try:
            wait_for(address.exists, "the address file")
            assert process.stderr is not None
            fcntl.fcntl(process.stderr, fcntl.F_SETPIPE_SZ, 4096)
            with PlanClient(address.read_text()) as client:
                while process.poll() is None:
                    client.ask_to_attach("one")  # two lines each time
                    client.hears_nothing(0.02)
            assert process.wait() == 1
        finally:
            process.kill()


def test_a_process_that_is_told_to_stop_waits_for_a_recording_no_longer_than_it_may(
    start_changed: Callable[..., Service], tmp_path: Path
) -> None:
    recordings = ["--record-dir", str(tmp_path / "recordings"), "--shutdown-grace-s", "0"]
    executor = start_changed(HANGING_DISK, *recordings)
    with PlanClient(executor.address) as client:
        client.attach()
        client.run(prefill())
        client.send_plan(prefill())  # in a row that is taken: this is recorded, and the loop goes on
        client.fault()
        client.attach()
        client.run(prefill())
    executor.process.terminate()
    assert executor.process.wait(ENDS_WITHIN_S) == 0


OWN_SECOND = """
import os, time
from executor_svc.turn_watch import TurnWatch
watch = TurnWatch(2.0, lambda _: os._exit(3))
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
    watch = TurnWatch(4 * TICK_S, lambda _: stuck.set())
    watch.start()
    for _ in range(2):
        watch.begin(0.0)
        assert not stuck.wait(TICK_S)
        watch.end()
    assert not stuck.wait(5 * TICK_S), "no step has begun"
    watch.begin(worst_step_s=TICK_S)
    assert not stuck.wait((PATIENCE - 1) * TICK_S)
    assert stuck.wait(20 * TICK_S)
