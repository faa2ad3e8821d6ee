"""A decoder layer in one call gives, to the bit, what its parts give one after another."""

from dataclasses import replace

import pytest
import torch

from kernels import KernelInputError, Projection, Rule
from kernels.cpu import linear, norms
from kernels.cpu.decoder_layer import DecoderLayer, Linear, Norm, Norms
from tests.kernels.pool import MIXED, NATIVE, Pool
from tests.kernels.test_projected import layer as projected

BF16 = torch.bfloat16
WIDTH, INNER = 48, 80
LEVELS = [backend for backend in NATIVE if linear.is_native(backend.level, BF16)]
PLACES = "before_attention", "after_attention", "before_mlp", "after_mlp"
each_level = pytest.mark.parametrize("native", LEVELS, ids=lambda backend: backend.name)


class Parts:
    """Of a layer for the rows of `pool`, with made-up weights."""

    def __init__(self, pool, *, places=PLACES, parallel=False, int8=False, bias=False):
        self.pool, self.parallel = pool, parallel
        generator = torch.Generator().manual_seed(3)

        def made_up(*shape):
            return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(BF16)

        _, self.projection, self.cos, self.sin, self.slots = projected(pool)
        heads, kinds = self.projection.num_heads * self.projection.head_dim, {"int8": int8, "level": pool.backend.level}

        def product(outputs, inputs):
            return Linear(linear.pack(made_up(outputs, inputs), **kinds), made_up(outputs) if bias else None)

        self.x = made_up(1, len(pool.q), WIDTH) * 4
        self.norms = Norms(**{place: Norm(made_up(WIDTH) + 1, 1e-5, place == "before_mlp") for place in places})
        self.qkv, self.output = product(self.projection.width, WIDTH), product(WIDTH, heads)
        self.gate_up = linear.pack_gated(made_up(INNER, WIDTH), made_up(INNER, WIDTH), **kinds)
        self.down = product(WIDTH, INNER)
        self.rule = Rule(0.3, window=9)

    def layer(self, **changes):
        parts = {
            name: getattr(self, name) for name in ("norms", "qkv", "projection", "rule", "output", "gate_up", "down")
        }
        return DecoderLayer(**parts | {"activation": "silu", "parallel": self.parallel} | changes)

    def in_one_call(self, **changes):
        given = {"x": self.x, "cos": self.cos, "sin": self.sin, "slots": self.slots} | changes
        return self.layer()(*given.values(), *self.pool.caches, self.pool.paged_rows())

    def one_after_another(self):
        def normed(norm, x):
            level = self.pool.backend.level
            return x if norm is None else norms.rms_norm(x, norm.weight, norm.eps, plus_one=norm.plus_one, level=level)

        def added(own, x, norm, residual):
            if norm is None:
                return linear.linear(x, own.weight, own.bias, residual)
            return residual + normed(norm, linear.linear(x, own.weight, own.bias))

        x, kinds = self.x[0], self.norms
        qkv = linear.linear(normed(kinds.before_attention, x), self.qkv.weight, self.qkv.bias)
        given = (
            qkv,
            self.projection,
            self.cos,
            self.sin,
            self.slots,
            *self.pool.caches,
            self.pool.paged_rows(),
            self.rule,
        )
        between = added(self.output, self.pool.backend.attend_projected(*given), kinds.after_attention, x)
        inner = linear.gated(normed(kinds.before_mlp, x if self.parallel else between), self.gate_up, "silu")
        return added(self.down, inner, kinds.after_mlp, between)[None]


def both(native, **kinds):
    """What one call, and what one after another gives, and the caches after each."""
    parts = [Parts(Pool(MIXED, backend=native, dtype=BF16, block_size=16), **kinds) for _ in range(2)]
    made = parts[0].in_one_call(), parts[1].one_after_another()
    return [(out, *own.pool.caches) for out, own in zip(made, parts, strict=True)]


@each_level
@pytest.mark.parametrize(
    "kinds",
    [
        {},
        {"places": ("before_attention", "before_mlp")},
        {"places": ("after_attention", "after_mlp")},
        {"places": ("before_attention",), "parallel": True},
        {"places": ()},
        {"bias": True},
        {"int8": True},
    ],
    ids=str,
)
def test_one_call_gives_what_the_parts_give(native, kinds):
    one, others = both(native, **kinds)
    assert one[0].shape == others[0].shape
    assert all(torch.equal(a, b) for a, b in zip(one, others, strict=True))


@each_level
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("x", {"x": torch.zeros(1, 1, WIDTH + 1, dtype=BF16)}),
        ("x", {"x": torch.zeros(1, 1, WIDTH)}),
        ("slots", {"slots": torch.zeros(3, dtype=torch.int64)}),
        ("cos and sin", {"cos": None}),
        ("cos and sin", {"cos": torch.zeros(2, 4)}),
        ("cos", {"cos": torch.zeros(2, 5), "sin": torch.zeros(2, 5)}),
    ],
)
def test_what_a_call_cannot_take_is_named(native, name, changes):
    parts = Parts(Pool(MIXED, backend=native, dtype=BF16, block_size=16))
    with pytest.raises(ValueError, match=name):
        parts.in_one_call(**changes)


@each_level
def test_parts_that_do_not_fit_each_other_are_refused(native):
    parts = Parts(Pool(MIXED, backend=native, dtype=BF16, block_size=16))
    with pytest.raises(KernelInputError, match="down: is"):
        parts.layer(down=parts.output)
    with pytest.raises(KernelInputError, match="qkv: is"):
        parts.layer(projection=replace(parts.projection, num_heads=parts.projection.num_heads * 2))
    with pytest.raises(KernelInputError, match="gate_up: must be"):
        parts.layer(gate_up=linear.pack(torch.zeros(INNER, WIDTH, dtype=BF16), level=native.level))
    with pytest.raises(KernelInputError, match="activation"):
        parts.layer(activation="tan")


@each_level
def test_caches_for_other_heads_are_refused(native):
    parts = Parts(Pool(MIXED, backend=native, dtype=BF16, block_size=16))
    other = Projection(parts.projection.num_heads, parts.projection.num_kv_heads, parts.projection.head_dim * 2)
    wide = Pool(MIXED, backend=native, dtype=BF16, block_size=16, dim=other.head_dim)
    with pytest.raises(ValueError, match="key_cache and value_cache: do not hold"):
        parts.layer()(parts.x, parts.cos, parts.sin, parts.slots, *wide.caches, parts.pool.paged_rows())
