"""Threads that share a kernel's work: none is missed, none is done twice, and nobody waits for who has not come."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.cpu.compiling import SOURCES

HANGS_S = 60
RULES = Path(__file__).parent / "workers_rules.cpp"
NAMES = [line.split("(")[1].split(")")[0] for line in RULES.read_text().splitlines() if line.startswith("  RULE(")]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    made = tmp_path_factory.mktemp("workers") / "rules"
    flags = ["-std=c++20", "-O2", "-pthread", f"-I{SOURCES}", "-D_GNU_SOURCE"]
    subprocess.run([compiler, *flags, str(RULES), str(SOURCES / "workers.cpp"), "-ldl", "-o", str(made)], check=True)
    return made


@pytest.mark.parametrize("rule", NAMES)
def test_the_rule(program, rule):
    assert subprocess.run([program, rule], timeout=HANGS_S, check=False).returncode == 0
