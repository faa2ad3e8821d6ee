"""Paged attention over a block-wise KV cache: one face, a backend for each kind of device.

The cache of one layer is a pair of tensors whose first dimension is the block; how the rest lies is the backend's own
affair. Key and value heads may differ in size. Choose a backend once, at start, with `backend(device)`, and call its
functions:

* `allocate_caches` makes the pair,
* `write_kv` puts the keys and values of a step's tokens into their slots,
* `paged_attention` lets every query attend to its row's context, found through the block table,
* `copy_blocks` copies whole blocks, for copy-on-write.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels import reference
from kernels.checks import KernelInputError
from kernels.shared_blocks import SharedBlocks

__all__ = ["REFERENCE", "Backend", "KernelInputError", "SharedBlocks", "backend"]


@dataclass(frozen=True, slots=True)
class Backend:
    """The functions of one backend; `kernels.reference` documents what each promises."""

    name: str
    paged_attention: Callable[..., torch.Tensor]
    write_kv: Callable[..., None]
    copy_blocks: Callable[..., None]
    allocate_caches: Callable[..., tuple[torch.Tensor, torch.Tensor]]


REFERENCE = Backend(
    "reference", reference.paged_attention, reference.write_kv, reference.copy_blocks, reference.allocate_caches
)


def backend(device: torch.device) -> Backend:
    """The backend that serves `device`. Chosen by the kind of device alone, so a start never differs by luck.

    Raises KernelInputError for a device that none serves, and where the package that its kernels need is missing.
    """
    if device.type == "cpu":
        return REFERENCE
    if device.type != "cuda":
        raise KernelInputError(f"device: is {device}, must be cpu or cuda; there are no kernels for another kind")
    if importlib.util.find_spec("triton") is None:
        raise KernelInputError(
            f"device: {device} needs the package triton, which is not installed: pip install 'paged-inference[gpu]'"
        )
    from kernels import triton  # only here: a machine without a GPU need not have Triton

    return Backend("triton", triton.paged_attention, triton.write_kv, triton.copy_blocks, triton.allocate_caches)
