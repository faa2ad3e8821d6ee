"""Denormals are flushed in all of torch's threads, which a process of its own must show: here they are long there."""

import subprocess
import sys

import pytest
import torch

HEAD = """
import torch
from executor_svc.model.denormals import flush_denormals
torch.set_num_threads(4)
"""
EARLY = "print(flush_denormals())"
LATE = "torch.ones(1 << 20).exp_(); print(flush_denormals())"


@pytest.fixture(autouse=True)
def _needs_the_setting():
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this CPU has no such setting")
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(("code", "expected"), [(EARLY, "True"), (LATE, "False")])
def test_threads_flush_denormals_when_they_are_told_before_they_begin(code, expected):
    done = subprocess.run([sys.executable, "-c", HEAD + code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split()[-1] == expected
    assert ("denormals_not_flushed" in done.stdout) == (code == LATE)
