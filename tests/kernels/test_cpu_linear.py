"""Products with packed weights against the same in fp64, at each level that this CPU runs, tiles emulated."""

import pytest
import torch
import torch.nn.functional as F

from kernels import KernelInputError
from kernels.cpu import linear
from kernels.cpu.levels import emulated, supported

pytestmark = pytest.mark.skipif(not supported(), reason="there are no native kernels for this CPU")
LEVELS = [*supported(), *emulated()]

# Rows of each block of vectors (6 or 12), above one, at and above one of tiles (32), and more than one chunk (256).
ROWS = (1, 2, 3, 4, 5, 6, 9, 12, 13, 32, 45, 300)
# Outputs and inputs that fill panels and steps and that do not; the last two are cut into pieces.
SHAPES = ((32, 64), (96, 256), (70, 100), (5, 33), (40, 1100), (40, 5000))
BF16_ERROR = 0.004  # 2^-9, half a unit of bf16's last place, and what sums in fp32 lose
INT8_ERROR = 0.02


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


@pytest.fixture(params=SHAPES, ids=str)
def weight(request):
    outputs, inputs = request.param
    return _random(outputs, inputs, seed=1) / inputs**0.5


def test_rows_times_a_weight(level, weight):
    packed = linear.pack(weight, level=level)
    for num_rows in _rows(level):
        x = _random(num_rows, weight.shape[1])
        assert _error(linear.linear(x, packed), _product(x, weight)) < BF16_ERROR, num_rows


def test_bias_activation_and_residual_are_added_before_one_rounding(level, weight):
    packed, bias = linear.pack(weight, level=level), _random(weight.shape[0], seed=2)
    for num_rows, activation in zip((1, 9, 40, 13), ("none", "gelu", "gelu_tanh", "relu"), strict=True):
        x, residual = _random(num_rows, weight.shape[1]), _random(num_rows, weight.shape[0], seed=3)
        expected = _activated(activation, _product(x, weight) + bias.double()) + residual.double()
        assert _error(linear.linear(x, packed, bias, residual, activation), expected) < BF16_ERROR, activation


def test_sums_are_not_rounded(level, weight):
    packed = linear.pack(weight, level=level)
    for num_rows in _rows(level):
        x = _random(num_rows, weight.shape[1])
        sums = linear.linear_sums(x, packed)
        assert sums.dtype == torch.float32
        assert _error(sums, _product(x, weight)) < 1e-6, num_rows


def test_a_gate_and_what_it_gates(level, weight):
    up = _random(*weight.shape, seed=4)
    packed = linear.pack_gated(weight, up, level=level)
    for num_rows, activation in zip((1, 9, 40, 13), ("silu", "gelu", "gelu_tanh", "relu"), strict=True):
        x = _random(num_rows, weight.shape[1])
        expected = _activated(activation, _product(x, weight)) * _product(x, up)
        assert _error(linear.gated(x, packed, activation), expected) < BF16_ERROR, activation


def test_several_weights_are_packed_as_one(level):
    weights = [_random(outputs, 100, seed=outputs) for outputs in (40, 24, 3, 61)]
    together = linear.pack_many(weights, level=level)
    assert torch.equal(together.panels, linear.pack(torch.cat(weights), level=level).panels)
    assert torch.equal(linear.unpack_rows(together, torch.arange(128)), torch.cat(weights))


def test_slices_and_views_are_packed_where_they_lie(level):
    merged = _random(96, 80)
    gate, up = merged[:48], merged[48:]
    x = _random(4, 80, seed=5)
    expected = F.silu(_product(x, gate)) * _product(x, up)
    assert _error(linear.gated(x, linear.pack_gated(gate, up, level=level), "silu"), expected) < BF16_ERROR
    transposed = _random(80, 96)
    assert _error(linear.linear(x, linear.pack(transposed.T, level=level)), _product(x, transposed.T)) < BF16_ERROR


def test_rows_of_wider_tensors_are_read_and_written_in_place(level):
    weight = _random(64, 64)
    packed = linear.pack(weight, level=level)
    wide, into = _random(20, 200), torch.zeros(20, 100, dtype=torch.bfloat16)
    x, out = wide[:, 64:128], into[:, 10:74]
    assert linear.linear(x, packed, out=out).data_ptr() == out.data_ptr()
    assert _error(out, _product(x, weight)) < BF16_ERROR
    assert not into[:, :10].any()
    assert not into[:, 74:].any()


def test_rows_of_results_that_would_crowd_a_cache_are_spread_and_are_read_so(level):
    weight, back = _random(1024, 64, seed=6) / 8, _random(64, 1024, seed=7) / 32
    x, residual = _random(40, 64).view(2, 20, 64), _random(40, 64, seed=8).view(2, 20, 64)
    wide = linear.linear(x, linear.pack(weight, level=level))
    assert wide.shape == (2, 20, 1024)
    between = wide.stride(1)
    assert between > 1024
    assert wide.stride() == (20 * between, between, 1)
    assert torch.equal(wide, linear.linear(x.view(40, 64), linear.pack(weight, level=level)).view(2, 20, 1024))
    packed = linear.pack(back, level=level)
    assert torch.equal(linear.linear(wide, packed), linear.linear(wide.contiguous(), packed))
    kept = torch.empty(2, 20, 72, dtype=torch.bfloat16)[..., :64]
    linear.linear(wide, packed, None, residual, out=kept)
    assert torch.equal(kept, linear.linear(wide, packed, None, residual))
    assert linear.linear_sums(x, linear.pack(weight, level=level)).is_contiguous()  # ranks add them up


def test_rows_that_are_not_evenly_apart_are_refused_where_they_are_written(level):
    packed, x = linear.pack(_random(64, 32, seed=9), level=level), _random(8, 32).view(2, 4, 32)
    apart = torch.empty(2, 5, 64, dtype=torch.bfloat16)[:, :4]
    with pytest.raises(ValueError, match="out: its rows must be contiguous, and one as far from the next"):
        linear.linear(x, packed, out=apart)
    with pytest.raises(ValueError, match="residual: its rows must be contiguous"):
        linear.linear(x, packed, None, apart)


def test_the_residual_may_be_overwritten(level):
    weight, x, residual = _random(64, 64), _random(20, 64), _random(20, 64, seed=6)
    expected = _product(x, weight) + residual.double()
    linear.linear(x, linear.pack(weight, level=level), residual=residual, out=residual)
    assert _error(residual, expected) < BF16_ERROR


def test_leading_dimensions_stay(level):
    packed = linear.pack(_random(48, 64), level=level)
    assert linear.linear(_random(2, 3, 64), packed).shape == (2, 3, 48)
    assert linear.linear(_random(64), packed).shape == (48,)
    assert linear.linear(_random(0, 64), packed).shape == (0, 48)


def test_the_largest_output_is_that_of_rounded_outputs(level, weight):
    packed, bias = linear.pack(weight, level=level), _random(weight.shape[0], seed=7)
    for num_rows in _rows(level):
        x = _random(num_rows, weight.shape[1])
        ids, finite = linear.linear_argmax(x, packed, bias)
        assert torch.equal(ids, linear.linear(x, packed, bias).argmax(-1)), num_rows
        assert finite.all()


def test_of_equal_outputs_the_first_is_taken_also_where_the_cap_makes_them_equal(level):
    weight = _random(1000, 64).repeat(3, 1)
    packed, x = linear.pack(weight, level=level), _random(40, 64)
    logits = linear.linear(x, packed)
    assert torch.equal(linear.linear_argmax(x, packed)[0], logits.argmax(-1))
    for cap in (30.0, 3.0, 0.5):
        capped = torch.tanh(logits / cap) * cap
        assert torch.equal(linear.linear_argmax(x, packed, soft_cap=cap)[0], capped.argmax(-1)), cap
    assert (capped == capped.amax(-1, keepdim=True)).sum() > 3 * 40  # there were such, beside the copies


def test_only_the_first_outputs_count(level):
    weight = _random(100, 64)
    packed, x = linear.pack(weight, level=level), _random(20, 64)
    ids, _ = linear.linear_argmax(x, packed, num_outputs=37)
    assert torch.equal(ids, linear.linear(x, packed)[:, :37].argmax(-1))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_are_told_apart(level, value):
    packed, x = linear.pack(_random(100, 64), level=level), _random(40, 64)
    x[[0, 17, 39], 5] = value
    _, finite = linear.linear_argmax(x, packed)
    assert finite.logical_not().nonzero().flatten().tolist() == [0, 17, 39]


def test_an_output_that_does_not_count_may_be_anything(level):
    weight = _random(100, 64)
    weight[50:] = float("nan")
    _, finite = linear.linear_argmax(_random(3, 64), linear.pack(weight, level=level), num_outputs=50)
    assert finite.all()


def test_rows_are_looked_up_in_a_packed_weight(level, weight):
    ids = torch.tensor([[0, weight.shape[0] - 1], [3, 0]])
    assert torch.equal(linear.unpack_rows(linear.pack(weight, level=level), ids), weight[ids])


@pytest.mark.parametrize("id", [-1, 100])
def test_rows_that_are_not_there_are_refused(level, id):
    with pytest.raises(IndexError, match=f"ids: {id} is not below 100"):
        linear.unpack_rows(linear.pack(_random(100, 64), level=level), torch.tensor([id]))


def test_int8_weights(level, weight):
    packed = linear.pack(weight, int8=True, level=level)
    assert _error(linear.unpack_rows(packed, torch.arange(weight.shape[0])), weight.double()) < INT8_ERROR
    for num_rows in _rows(level):
        x = _random(num_rows, weight.shape[1])
        assert _error(linear.linear(x, packed), _product(x, weight)) < INT8_ERROR, num_rows
        ids, finite = linear.linear_argmax(x, packed)
        assert torch.equal(ids, linear.linear(x, packed).argmax(-1))
        assert finite.all()


def test_int8_gates(level, weight):
    up = _random(*weight.shape, seed=4)
    packed = linear.pack_gated(weight, up, int8=True, level=level)
    x = _random(9, weight.shape[1])
    expected = F.silu(_product(x, weight)) * _product(x, up)
    assert _error(linear.gated(x, packed, "silu"), expected) < 2 * INT8_ERROR


def test_int8_rows_of_extreme_size(level):
    weight, x = _random(64, 64), _random(4, 64)
    x[0], x[1], x[2] = 0, x[1] * 1e30, x[2] * 1e-30
    packed = linear.pack(weight, int8=True, level=level)
    out = linear.linear(x, packed)
    assert not out[0].any()
    assert _error(out[1], _product(x[1:2], weight)[0]) < INT8_ERROR
    assert _error(out[2], _product(x[2:3], weight)[0]) < INT8_ERROR
    x[3, 7] = float("inf")
    assert linear.linear_argmax(x, packed)[1].tolist() == [True, True, True, False]


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_spoils_its_output_and_no_other(level, value, int8):
    weight = _random(40, 64)
    weight[3, 5] = value
    packed = linear.pack(weight, int8=int8, level=level)
    out = linear.linear(_random(5, 64), packed)
    assert not out[:, 3].isfinite().any()
    assert torch.cat([out[:, :3], out[:, 4:]], 1).isfinite().all()
    assert not linear.linear_argmax(_random(5, 64), packed)[1].any()


@pytest.mark.parametrize("sign", [1, -1])
def test_int8_sums_hold_as_many_inputs_as_are_allowed(sign):
    weight, x = torch.ones(1, 133_144).bfloat16(), sign * torch.ones(1, 133_144).bfloat16()
    assert linear.linear_sums(x, linear.pack(weight, int8=True)).item() == pytest.approx(sign * 133_144, rel=1e-6)
    with pytest.raises(ValueError, match="weights: have 133145 inputs, of which"):
        linear.pack(torch.ones(1, 133_145).bfloat16(), int8=True)


@pytest.mark.parametrize("int8", [False, True])
def test_a_product_is_the_same_with_more_threads(level, int8):
    weight, x = _random(500, 300), _random(30, 300)
    packed = linear.pack(weight, int8=int8, level=level)
    alone = linear.linear(x, packed), linear.linear_argmax(x, packed)[0]
    torch.set_num_threads(3)
    try:
        together = linear.linear(x, packed), linear.linear_argmax(x, packed)[0]
    finally:
        torch.set_num_threads(1)
    assert torch.equal(alone[0], together[0])
    assert torch.equal(alone[1], together[1])


def test_what_does_not_fit_is_refused(level):
    packed, x = linear.pack(_random(64, 48), level=level), _random(4, 48)
    for message, call in {
        "x: shape is": lambda: linear.linear(_random(4, 40), packed),
        "x: dtype is": lambda: linear.linear(x.float(), packed),
        r"x: shape is \[\]": lambda: linear.linear(x[0, 0], packed),
        "bias: must be 64": lambda: linear.linear(x, packed, bias=_random(63)),
        "residual: shape is": lambda: linear.linear(x, packed, residual=_random(3, 64)),
        "out: its rows": lambda: linear.linear(x, packed, out=_random(64, 4).T),
        "activation: is swish": lambda: linear.linear(x, packed, activation="swish"),
        "weight: is not gated": lambda: linear.gated(x, packed, "silu"),
        "soft_cap: is -1": lambda: linear.linear_argmax(x, packed, soft_cap=-1.0),
        "num_outputs: is 65": lambda: linear.linear_argmax(x, packed, num_outputs=65),
        "weights: dtype is": lambda: linear.pack(_random(4, 4).float(), level=level),
        "weights: shape is": lambda: linear.pack_many([_random(4, 4), _random(4, 5)], level=level),
        "weights: a gate of 4": lambda: linear.pack_gated(_random(4, 4), _random(5, 4), level=level),
    }.items():
        with pytest.raises((KernelInputError, ValueError), match=message):
            call()


def test_products_are_native_in_bf16_at_each_level(level):
    assert linear.is_native(level, torch.bfloat16)
    assert not linear.is_native(level, torch.float32)
    assert not linear.is_native("reference", torch.bfloat16)


def _rows(level: str) -> tuple[int, ...]:
    return tuple(rows for rows in ROWS if rows <= (45 if level == "amx_emulated" else 300))


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().T


def _activated(activation: str, x: torch.Tensor) -> torch.Tensor:
    return {
        "none": lambda x: x,
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
    }[activation](x)


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, over all elements."""
    return float((actual.double() - expected).norm() / expected.norm())
