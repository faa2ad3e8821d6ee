# mypy: disable-error-code="no-untyped-def"
"""`write_kv`: the keys and values of a step's tokens go to their slots."""

import torch
import triton
import triton.language as tl

from kernels.checks import check_write
from kernels.triton.device import check_device, check_last_stride
from kernels.triton.tiles import power_of_two

ELEMENTS_PER_PROGRAM = 2048


@triton.jit(do_not_specialize=["num_vectors"])
def write_kernel(
    k,
    v,
    key_cache,
    value_cache,
    slots,
    num_vectors,  # tokens * heads
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """A program copies VECTORS keys and as many values, each one head of one token."""
    vector = tl.program_id(0).to(tl.int64) * VECTORS + tl.arange(0, VECTORS)
    used = vector < num_vectors
    token = vector // NUM_HEADS
    head = vector % NUM_HEADS
    slot = tl.load(slots + token, mask=used, other=0)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE

    d = tl.arange(0, BLOCK_D)
    mask = used[:, None] & (d < HEAD_DIM)[None, :]
    source = k + token * k_token_stride + head * k_head_stride
    target = key_cache + block * key_block_stride + offset * key_slot_stride + head * key_head_stride
    keys = tl.load(source[:, None] + d[None, :], mask=mask)
    tl.store(target[:, None] + d[None, :], keys.to(key_cache.dtype.element_ty), mask=mask)

    dv = tl.arange(0, BLOCK_V)
    mask = used[:, None] & (dv < VALUE_DIM)[None, :]
    source = v + token * v_token_stride + head * v_head_stride
    target = value_cache + block * value_block_stride + offset * value_slot_stride + head * value_head_stride
    values = tl.load(source[:, None] + dv[None, :], mask=mask)
    tl.store(target[:, None] + dv[None, :], values.to(value_cache.dtype.element_ty), mask=mask)


def vectors_per_program(head_dim: int, value_dim: int) -> int:
    return max(1, ELEMENTS_PER_PROGRAM // max(power_of_two(head_dim), power_of_two(value_dim)))


def write_kv(
    k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """As `kernels.reference.write_kv`. The last dimension of all but `slots` must be contiguous."""
    check_write(k, v, key_cache, value_cache, slots)
    check_device(key_cache.device, k.dtype, v.dtype, key_cache.dtype)
    for name, tensor in (("k", k), ("v", v), ("key_cache", key_cache), ("value_cache", value_cache), ("slots", slots)):
        check_last_stride(name, tensor)
    num_tokens, num_heads, head_dim = k.shape
    if num_tokens == 0:
        return
    value_dim = v.shape[2]
    vectors = vectors_per_program(head_dim, value_dim)
    write_kernel[(-(-num_tokens * num_heads // vectors),)](
        k, v, key_cache, value_cache, slots, num_tokens * num_heads,
        *k.stride()[:2], *v.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3],
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, VALUE_DIM=value_dim,
        BLOCK_D=power_of_two(head_dim), BLOCK_V=power_of_two(value_dim),
        BLOCK_SIZE=key_cache.shape[1], VECTORS=vectors, enable_fp_fusion=True,
    )  # fmt: skip
