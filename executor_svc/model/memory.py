"""KV memory: how much of it there is, and the caches themselves."""

from dataclasses import dataclass

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from executor_svc.model.free_memory import available_bytes
from executor_svc.model.proof import ProvenLayer
from executor_svc.model.refusal import ModelRefused
from kernels import Backend

log = structlog.get_logger(__name__)

CPU_SHARE, CPU_MOST_BYTES = 0.5, 4 << 30  # of what is free after loading; other processes live there too
NUM_RESERVED = 1  # block 0: padding is written there, and it is never lent


@dataclass(frozen=True, slots=True)
class KVMemory:
    """One key and one value cache a layer, in the backend's layout, zero at first.

    They are of the layer's own dtype, or of `dtype`; int8 where the backend has such caches.
    """

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    block_size: int
    unused: NDArray[np.bool_]  # [num_blocks]; which blocks nothing has been written to yet

    @classmethod
    def allocate(
        cls,
        layers: list[ProvenLayer],
        num_blocks: int,
        block_size: int,
        device: torch.device,
        backend: Backend,
        dtype: torch.dtype | None = None,
    ) -> "KVMemory":
        def pair(layer: ProvenLayer) -> tuple[torch.Tensor, torch.Tensor]:
            heads = (layer.num_kv_heads, layer.key_dim, layer.value_dim)
            return backend.allocate_caches(num_blocks, block_size, *heads, dtype or layer.dtype, device)

        return cls([pair(layer) for layer in layers], block_size, np.ones(num_blocks, np.bool_))

    def populate(self, backend: Backend) -> None:
        """Returns at once: who is ready to serve need not wait until the system has given all of it."""
        if backend.populate is not None:
            backend.populate(self.tensors)

    def expect(self, slots: NDArray[np.int64], backend: Backend) -> None:
        """They are about to be written: blocks of which none has been get their memory now."""
        if backend.touch_blocks is None:
            return
        blocks = slots // self.block_size
        first = np.unique(blocks[self.unused[blocks]])
        if len(first):
            self.unused[first] = False
            backend.touch_blocks(self.tensors, torch.from_numpy(first))

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [cache for pair in self.layers for cache in pair]


def block_bytes(layers: list[ProvenLayer], block_size: int, backend: Backend, dtype: torch.dtype | None = None) -> int:
    """Of one block in all layers, with whatever the backend's layout adds to it."""
    caches = KVMemory.allocate(layers, 1, block_size, torch.device("meta"), backend, dtype).tensors
    memories = {cache.untyped_storage()._cdata: cache.untyped_storage().nbytes() for cache in caches}
    return sum(memories.values())


def step_bytes(*, tokens_per_step: int, max_rows: int, widest_layer: int, vocab_size: int, itemsize: int) -> int:
    """Roughly the most that one step's temporaries take: six tensors of the widest layer's output for all tokens,
    logits of all rows, their penalties' counts, what rules add to them (kept, and taken for the step), and four fp32 or
    float64 columns as wide as the vocabulary for the rows sampled at once."""
    activations = 6 * tokens_per_step * widest_layer * itemsize
    sampling = max_rows * vocab_size * (itemsize + 4 + 8 + 8) + 4 * 8 * min(max_rows * vocab_size, 1 << 24)
    return activations + sampling


def choose_num_blocks(
    bytes_per_block: int,
    reserved_bytes: int,
    device: torch.device,
    *,
    num_blocks: int | None,
    kv_bytes: int | None,
    most_blocks: int,
    num_sharing: int = 1,
) -> int:
    """Blocks to allocate, block 0 included: `num_blocks` as given, or what fits `kv_bytes`, or a share of free memory.

    Only the last is limited to `most_blocks`, for a small model in a large memory. `reserved_bytes` stay free: for a
    step's temporaries, and what is not to be taken at all. Of the rest a GPU gives all, a CPU a share. Of a CPU's
    memory `num_sharing` processes take equal parts. Raises ModelRefused.
    """
    num_sharing = num_sharing if device.type == "cpu" else 1
    available = available_bytes(device) // num_sharing
    usable = max(0, available - reserved_bytes)
    if num_blocks is None:
        if kv_bytes is None:
            share = min(CPU_SHARE * usable, CPU_MOST_BYTES // num_sharing) if device.type == "cpu" else usable
            kv_bytes = int(min(share, most_blocks * bytes_per_block))
        num_blocks = kv_bytes // bytes_per_block
    required = max(num_blocks, NUM_RESERVED + 1) * bytes_per_block
    if num_blocks <= NUM_RESERVED or required > usable:
        raise ModelRefused(
            f"KV memory: {required} bytes are required for {max(num_blocks, NUM_RESERVED + 1)} blocks of "
            f"{bytes_per_block} bytes; {available} bytes are available on {device}, of which {reserved_bytes} are kept "
            "for a step's temporaries and for others; set num_blocks or kv_memory to fit, or lower max_rows or "
            "tokens_per_step"
        )
    log.info("kv_memory", num_blocks=num_blocks, block_bytes=bytes_per_block, available_bytes=available)
    return num_blocks


def useful_blocks(max_rows: int, max_model_len: int, block_size: int) -> int:
    """Twice what all rows hold at their longest: the other half keeps prefixes of sequences that have ended."""
    return NUM_RESERVED + 2 * max_rows * -(-max_model_len // block_size)


def fit_model_len(max_model_len: int, num_blocks: int, block_size: int) -> int:
    """The longest sequence, in tokens, that fits the model and all lendable blocks together."""
    most = (num_blocks - NUM_RESERVED) * block_size
    if most < max_model_len:
        log.warning("max_model_len_lowered", max_model_len=most, wanted=max_model_len, reason="kv memory holds no more")
    return min(max_model_len, most)
