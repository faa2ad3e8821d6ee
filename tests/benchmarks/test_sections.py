"""A section of the GPU check that breaks is told of, keeps what it had found, and harms no other."""

import subprocess
import sys

import pytest

from benchmarks.gpu.sections import Machine, Section, run_section
from tests.processes import wait_for

FAULTY = "tests.benchmarks.faulty"


@pytest.mark.parametrize("device", ["cpu", "cuda"])  # processes begin differently; these need no GPU
@pytest.mark.parametrize(
    ("name", "error"),
    [("raises", "ArithmeticError: a sum does not add up"), ("dies", "its process ended with code 3")],
)
def test_a_section_that_breaks_names_its_fault_and_keeps_its_figures(name, error, device):
    outcome = run_section(Section(name, 60), Machine(device), FAULTY)
    assert outcome.figures == {"found": 1}
    assert outcome.errors == [error]


def test_a_piece_of_a_section_that_breaks_does_not_end_the_section():
    outcome = run_section(Section("goes_on", 60), Machine("cpu"), FAULTY)
    assert outcome.errors == ["broken: ZeroDivisionError: division by zero"]
    assert outcome.figures == {"whole": {"number": "nan"}}  # JSON has no number for it


def test_a_section_is_ended_with_all_its_processes_when_its_time_is_over():
    outcome = run_section(Section("never_ends", 3), Machine("cuda"), FAULTY)
    assert outcome.figures["found"] == 1
    assert outcome.errors == ["took longer than 3 s, and was ended"]
    processes = outcome.figures["processes"]
    wait_for(lambda: not any(runs(process) for process in processes), "the end of both processes", 20)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_section_ends_when_the_check_itself_is_killed(tmp_path, device):
    file = tmp_path / "process"
    run = f"run_section(Section('never_ends', 60), Machine('{device}', ('{file}',)), '{FAULTY}')"
    check = subprocess.Popen(
        [sys.executable, "-c", f"from benchmarks.gpu.sections import *\nif __name__ == '__main__': {run}"]
    )
    try:
        wait_for(lambda: file.exists() and file.read_text(), "the section's process")
    finally:
        check.kill()
        check.wait()
    wait_for(lambda: not runs(int(file.read_text())), "its end", 20)


def runs(process: int) -> bool:
    """Ended processes whose parent has gone may still be listed, as zombies, until somebody asks for them."""
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_section_that_does_not_exist_is_an_error_and_no_more():
    outcome = run_section(Section("not_there", 60), Machine("cpu"), FAULTY)
    assert outcome.errors == [f"ModuleNotFoundError: No module named '{FAULTY}.not_there'"]
