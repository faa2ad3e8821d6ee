"""Torch's threads sleep soon after their work; OpenMP is told before torch brings it, as a process of its own shows."""

import os
import subprocess
import sys

import pytest

# As the executor does it, but for the module that loads models, which takes long to import.
CODE = """
import sys, types
sys.modules["executor_svc.model.load"] = types.ModuleType("load")
from executor_svc.model_loading import with_torch
from executor_svc.settings import parse
with_torch(parse(["--model", "none"]), lambda load: None)
"""
OURS = "GOMP_SPINCOUNT = '4000'"


@pytest.mark.parametrize(("own", "expected"), [({}, True), ({"OMP_WAIT_POLICY": "active"}, False)], ids=str)
def test_threads_wait_briefly_unless_the_environment_says_how(own, expected):
    others = {name: value for name, value in os.environ.items() if name not in {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}}
    environment = others | {"OMP_DISPLAY_ENV": "verbose"} | own
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    assert "GOMP_SPINCOUNT" in done.stderr
    assert (OURS in done.stderr) is expected
