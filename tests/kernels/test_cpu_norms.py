"""Norms against torch's in fp64, at each level."""

import pytest
import torch
import torch.nn.functional as F

from kernels.cpu import norms
from kernels.cpu.levels import supported

ERRORS = {torch.float32: 1e-6, torch.bfloat16: 0.004, torch.float16: 0.0005}
EPS = 1e-6

pytestmark = pytest.mark.skipif(not supported(), reason="there are no kernels for this CPU")


@pytest.fixture(params=supported())
def level(request):
    return request.param


@pytest.fixture(params=ERRORS, ids=str)
def dtype(request):
    return request.param


@pytest.mark.parametrize("size", [1024, 100, 7, 1])
def test_rms_norm(level, dtype, size):
    x, weight = _random(9, size, dtype), _random(1, size, dtype)[0]
    for plus_one in (False, True):
        expected = F.rms_norm(x.double(), (size,), weight.double() + plus_one, EPS)
        assert _error(norms.rms_norm(x, weight, EPS, plus_one=plus_one, level=level), expected) < ERRORS[dtype]
    assert _error(norms.rms_norm(x, None, EPS, level=level), F.rms_norm(x.double(), (size,), None, EPS)) < ERRORS[dtype]


@pytest.mark.parametrize("size", [1024, 100, 7])
def test_layer_norm(level, dtype, size):
    x, weight, bias = _random(9, size, dtype) + 3, _random(1, size, dtype)[0], _random(2, size, dtype)[1]
    expected = F.layer_norm(x.double(), (size,), weight.double(), bias.double(), EPS)
    assert _error(norms.layer_norm(x, weight, bias, EPS, level=level), expected) < 2 * ERRORS[dtype]


@pytest.mark.parametrize("size", [1024, 100, 7])
def test_what_is_added_before_a_norm_is_kept(level, dtype, size):
    x, residual, weight = _random(9, size, dtype), _random(10, size, dtype)[1:], _random(1, size, dtype)[0]
    exact = x.double() + residual.double()
    normed, total = norms.add_rms_norm(x, residual, weight, EPS, level=level)
    assert torch.equal(total, x + residual)
    assert _error(normed, F.rms_norm(exact, (size,), weight.double(), EPS)) < ERRORS[dtype]
    normed, total = norms.add_layer_norm(x, residual, weight, None, EPS, level=level)
    assert torch.equal(total, x + residual)
    assert _error(normed, F.layer_norm(exact, (size,), weight.double(), None, EPS)) < 2 * ERRORS[dtype]


def test_heads_of_a_wider_tensor(level, dtype):
    wide, weight = _random(5, 96, dtype), _random(1, 32, dtype)[0]
    expected = F.rms_norm(wide[:, 32:64].double(), (32,), weight.double(), EPS)
    assert _error(norms.rms_norm(wide[:, 32:64], weight, EPS, level=level), expected) < ERRORS[dtype]
    heads = wide.view(5, 3, 32)
    expected = F.rms_norm(heads.double(), (32,), weight.double(), EPS)
    assert _error(norms.rms_norm(heads, weight, EPS, level=level), expected) < ERRORS[dtype]


@pytest.mark.parametrize("spread", [1040, 1024], ids=["evenly apart", "not evenly apart"])
def test_rows_that_lie_apart(level, dtype, spread):
    x = _random(2 * 6, spread, dtype).view(2, 6, spread)[:, : 6 if spread > 1024 else 5, :1024]
    weight, residual = _random(1, 1024, dtype)[0], _random(20, 1024, dtype)[: x.shape[0] * x.shape[1]].view(x.shape)
    assert torch.equal(
        norms.rms_norm(x, weight, EPS, level=level), norms.rms_norm(x.contiguous(), weight, EPS, level=level)
    )
    for normed, expected in zip(
        norms.add_rms_norm(residual, x, weight, EPS, level=level),
        norms.add_rms_norm(residual, x.contiguous(), weight, EPS, level=level),
        strict=True,
    ):
        assert torch.equal(normed, expected)
        assert normed.stride(1) > 1024


def test_what_is_not_finite_stays_in_its_row(level, dtype):
    x = _random(3, 40, dtype)
    x[1, 39] = float("nan")
    finite = norms.rms_norm(x, None, EPS, level=level).isfinite().all(-1)
    assert finite.tolist() == [True, False, True]


def test_what_does_not_fit_is_refused(level):
    x = torch.zeros(3, 8)
    with pytest.raises(ValueError, match=r"weight: is Float \[7\], must be Float \[8\]"):
        norms.rms_norm(x, torch.zeros(7), EPS, level=level)
    with pytest.raises(ValueError, match="residual: is Float"):
        norms.add_rms_norm(x, torch.zeros(2, 8), None, EPS, level=level)
    with pytest.raises(ValueError, match="x: dtype is Double"):
        norms.rms_norm(x.double(), None, EPS, level=level)


def _random(num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(num_rows)).to(dtype)


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, over all elements."""
    return float((actual.double() - expected).norm() / expected.norm())
