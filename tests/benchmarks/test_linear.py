"""The benchmark of linear layers measures on any CPU that has native products, beside what else that CPU has."""

import json
import sys

import pytest
import torch

from benchmarks import linear
from kernels.cpu.levels import supported

pytestmark = pytest.mark.skipif(not supported(), reason="there are no native kernels for this CPU")


def test_products_stand_beside_those_that_this_cpu_has(monkeypatch, capsys):
    monkeypatch.setattr(linear, "ROTATED_BYTES", 1 << 16)
    monkeypatch.setattr(linear, "SECONDS", 0.0)
    monkeypatch.setattr(sys, "argv", ["linear", "--json", "--rows", "1", "4", "--shapes", "64x64", "96x64"])
    with torch.no_grad():
        linear.main()
    figures = json.loads(capsys.readouterr().out)
    assert list(figures) == ["1", "4"]
    other = "over_onednn" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "over_fp32"
    for ratios in figures.values():
        assert list(ratios) == ["of_limit", "over_torch", other]
        assert all(ratio > 0 for ratio in ratios.values())
