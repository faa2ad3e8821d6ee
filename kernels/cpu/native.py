"""The face of one level's native kernels: checks and prepares what the operations take."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from kernels import reference
from kernels.attention import Rows, Rule, check_call
from kernels.checks import FLOAT_DTYPES, KernelInputError, check_copies, check_tensor
from kernels.cpu import caches
from kernels.cpu.compiling import CACHE, Told, silent
from kernels.cpu.library import ops
from kernels.cpu.plans import attention_plan, dense
from kernels.projection import Projection


class NativeKernels:
    """Those of one level. Raises BuildError where they cannot be had."""

    def __init__(self, level: str, cache_dir: Path = CACHE, told: Told = silent) -> None:
        self._ops = ops(level, cache_dir, told)

    def allocate_caches(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A key and a value cache, zero; in the reference's layout where the native one does not do.

        Large ones get their pages when these are first used, or by `populate`. Those of int8 keep keys and values in 8
        bits. Raises KernelInputError.
        """
        shape = num_blocks, block_size, num_kv_heads, key_dim, value_dim, dtype
        if not caches.is_served(block_size, dtype):
            return reference.allocate_caches(*shape, device)
        on_device = partial(torch.zeros, dtype=torch.uint8, device=device)  # meta, for who asks what they would take
        return caches.allocate(*shape, self._ops.zero_bytes if device.type == "cpu" else on_device)

    def populate(self, tensors: Sequence[torch.Tensor]) -> None:
        """Has memory of `allocate_caches` be there before it is used, from threads that work while no kernel does.

        Returns at once; the tensors may be used meanwhile, and are not kept.
        """
        self._ops.populate(list(tensors))

    def touch_blocks(self, caches: Sequence[torch.Tensor], blocks: torch.Tensor) -> None:
        """Has memory of `allocate_caches` be there for `blocks`, int64 `[num_blocks]`, before they are written first.

        All threads wait for the system's pages, where else the one that writes waits alone. Content stays.
        """
        self._ops.touch_blocks(list(caches), blocks)

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """As `kernels.reference.write_kv`."""
        if not caches.is_native(key_cache):
            return reference.write_kv(k, v, key_cache, value_cache, slots)
        caches.check_caches(key_cache, value_cache)
        device, num_kv_heads = key_cache.device, key_cache.shape[1]
        check_tensor("k", k, (None, num_kv_heads, None), FLOAT_DTYPES, device)
        caches.check_key_dim("k", k.shape[2], key_cache)
        check_tensor("v", v, (k.shape[0], num_kv_heads, value_cache.shape[3]), FLOAT_DTYPES, device)
        check_tensor("slots", slots, (k.shape[0],), (torch.int64,), device)
        if v.dtype != k.dtype:
            k, v = k.float(), v.float()
        self._ops.write_kv(dense(k), dense(v), key_cache, value_cache, slots.contiguous())
        return None

    def copy_blocks(self, tensors: Sequence[torch.Tensor], source: torch.Tensor, destination: torch.Tensor) -> None:
        """As `kernels.reference.copy_blocks`."""
        check_copies(tensors, source, destination)
        self._ops.copy_blocks(list(tensors), source.long().contiguous(), destination.long().contiguous())

    def paged_attention(
        self, q: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, rows: Rows, rule: Rule
    ) -> torch.Tensor:
        """As `kernels.reference.paged_attention`.

        Products of bf16 queries with a bf16 cache, and of weights with its values, are of bf16 numbers where the level
        has an instruction for that; those with an int8 cache are of integers where it has one, for which queries and
        weights are rounded to 16 bits; all others, and all sums, are of fp32.
        """
        if not caches.is_native(key_cache):
            return reference.paged_attention(q, key_cache, value_cache, rows, rule)
        caches.check_caches(key_cache, value_cache)
        check_tensor("q", q, (None, None, None), FLOAT_DTYPES, key_cache.device)
        caches.check_key_dim("q", q.shape[2], key_cache)
        check_call(q, key_cache.shape[1], rows, rule)
        attended: torch.Tensor = self._ops.paged_attention(
            dense(q),
            key_cache,
            value_cache,
            attention_plan(self._ops, q.shape[0], q.shape[1], key_cache, value_cache, rows, rule),
            rule.scale,
            rule.soft_cap or 0.0,
            rule.exact_sinks,
        )
        return attended

    def attend_projected(
        self,
        qkv: torch.Tensor,
        projection: Projection,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        slots: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        rows: Rows,
        rule: Rule,
    ) -> torch.Tensor:
        """As `kernels.reference.attend_projected`, with the arithmetic of `paged_attention`."""
        if not caches.is_native(key_cache):
            return reference.attend_projected(qkv, projection, cos, sin, slots, key_cache, value_cache, rows, rule)
        projection.check(qkv, cos, sin)
        caches.check_caches(key_cache, value_cache)
        caches.check_key_dim("qkv", projection.head_dim, key_cache)
        num_kv_heads, head_dim = key_cache.shape[1], value_cache.shape[3]
        if (projection.num_kv_heads, projection.head_dim) != (num_kv_heads, head_dim):
            raise KernelInputError(
                f"qkv: {projection.num_kv_heads} key/value heads of {projection.head_dim} do not fit a cache for "
                f"{num_kv_heads} of {head_dim}"
            )
        check_tensor("slots", slots, (len(qkv),), (torch.int64,), key_cache.device)
        heads = dense(qkv).unflatten(1, (-1, projection.head_dim))
        check_call(heads[:, : projection.num_heads], num_kv_heads, rows, rule)
        attended: torch.Tensor = self._ops.attend_projected(
            heads,
            projection.query_norm,
            projection.key_norm,
            projection.norm_eps,
            None if cos is None else cos.float().contiguous(),
            None if sin is None else sin.float().contiguous(),
            projection.rotary == "interleaved",
            slots.contiguous(),
            key_cache,
            value_cache,
            attention_plan(self._ops, len(qkv), projection.num_heads, key_cache, value_cache, rows, rule),
            rule.scale,
            rule.soft_cap or 0.0,
            rule.exact_sinks,
        )
        return attended
