"""Which process of several this is, as torchrun says, and what happens where it says nothing that makes sense."""

import os
import subprocess
import sys

import pytest

from executor_svc.ranks import ONE, Ranks, RanksUnclear

SECOND = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1", "RANK": "0"}])
def test_a_process_that_nobody_counts_is_alone(environment: dict[str, str]) -> None:
    assert Ranks.of_environment(environment) == ONE


def test_torchrun_says_which_one_it_is() -> None:
    assert Ranks.of_environment(SECOND) == Ranks(rank=1, size=2, local_rank=1, local_size=2)
    assert Ranks.of_environment(SECOND | {"TORCHELASTIC_RESTART_COUNT": "3"}).attempt == 3


@pytest.mark.parametrize(
    "changes", [{"RANK": "2"}, {"RANK": "one"}, {"LOCAL_RANK": "-1"}, {"LOCAL_WORLD_SIZE": "4"}, {"LOCAL_RANK": None}]
)
def test_what_makes_no_sense_is_refused(changes: dict[str, str | None]) -> None:
    environment = {name: value for name, value in (SECOND | changes).items() if value is not None}
    with pytest.raises(RanksUnclear, match="torchrun"):
        Ranks.of_environment(environment)


def test_the_simulated_model_is_not_spread() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "executor_svc", "--simulate"],
        env={**os.environ, **SECOND},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 2
    assert "--simulate: the simulated model is not spread over 2 processes" in ended.stderr


FOLLOWER = """
import signal, sys, time
from executor_svc.process import FollowerSignals
signals = FollowerSignals(float(sys.argv[2]))
signals.following = sys.argv[1] == "following"
print("ready", flush=True)
time.sleep(30)
"""


def follower(state: str, grace_s: float) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", FOLLOWER, state, str(grace_s)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_signal_ends_a_follower_that_loads_at_once() -> None:
    with follower("loading", 30) as process:
        process.terminate()
        assert process.wait(10) == 128 + 15


def test_a_signal_leaves_a_follower_time_to_be_told_to_end() -> None:
    with follower("following", 30) as process:
        process.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        process.terminate()
        assert process.wait(10) == 128 + 15


def test_a_follower_that_is_not_told_to_end_does_so_when_its_time_is_over() -> None:
    with follower("following", 0.2) as process:
        process.terminate()
        assert process.wait(10) == 128 + 15
