"""Packages of others do not speak in our log of what nobody has asked for."""

import subprocess
import sys

import pytest


def test_loading_what_quantised_checkpoints_need_says_nothing():
    pytest.importorskip("torchao")
    code = (
        "from executor_svc import logs; logs.configure('info', 'console')\n"
        "import torch, torchao.prototype.mx_formats, transformers"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
