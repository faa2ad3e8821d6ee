"""Paged attention over a block-wise KV cache: one face, a backend for each kind of device.

The cache of one layer is a pair of tensors whose first dimension is the block; how the rest lies is the backend's own
affair. Key and value heads may differ in size. Choose a backend once, at start, with `backend(device)`, and call its
functions:

* `allocate_caches` makes the pair,
* `write_kv` puts the keys and values of a step's tokens into their slots,
* `paged_attention` lets every query attend to its row's context, found through the block table: for the `Rows` of a
  step, by the `Rule` of a layer,
* `copy_blocks` copies whole blocks, for copy-on-write.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kernels import cpu, reference
from kernels.attention import Rows, Rule
from kernels.checks import KernelInputError
from kernels.cpu.compiling import CACHE, BuildError, Told, silent
from kernels.projection import Projection
from kernels.shared_blocks import SharedBlocks

__all__ = ["REFERENCE", "Backend", "KernelInputError", "Projection", "Rows", "Rule", "SharedBlocks", "backend"]


@dataclass(frozen=True, slots=True)
class Backend:
    """The functions of one backend; `kernels.reference` documents what each promises."""

    name: str
    paged_attention: Callable[..., torch.Tensor]
    write_kv: Callable[..., None]
    copy_blocks: Callable[..., None]
    allocate_caches: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    # Norm, rotary embedding, write_kv and paged_attention as one; None where there is no such kernel.
    attend_projected: Callable[..., torch.Tensor] | None = None
    # Has the memory of caches be there before it is used, in the background; None where it is there from the beginning.
    populate: Callable[[Sequence[torch.Tensor]], None] | None = None
    # Has that of blocks be there at once, which are about to be written first.
    touch_blocks: Callable[[Sequence[torch.Tensor], torch.Tensor], None] | None = None
    level: str | None = None  # of a CPU's native kernels; None for all others
    note: str = ""  # why it is not the one that the device is best served by


REFERENCE = Backend(
    "reference",
    reference.paged_attention,
    reference.write_kv,
    reference.copy_blocks,
    reference.allocate_caches,
    reference.attend_projected,
)


def backend(
    device: torch.device, *, cpu_kernels: str = "auto", cache_dir: Path = CACHE, told: Told = silent
) -> Backend:
    """The backend that serves `device`.

    For a CPU `cpu_kernels` names the level of its native kernels (`kernels.cpu.levels`), which are compiled into
    `cache_dir` if they have not been, or `reference`. `auto` takes the best level that the CPU runs, and where that
    cannot be built the one below it, down to the reference; `note` says why. `told` hears how far compiling has come,
    which takes seconds.

    Raises KernelInputError for a device that none serves, for a level that cannot be had, and where the package that a
    GPU's kernels need is missing.
    """
    if device.type == "cpu":
        return _cpu_backend(cpu_kernels, cache_dir, told)
    if device.type != "cuda":
        raise KernelInputError(f"device: is {device}, must be cpu or cuda; there are no kernels for another kind")
    if importlib.util.find_spec("triton") is None:
        raise KernelInputError(
            f"device: {device} needs the package triton, which is not installed: pip install 'paged-inference[gpu]'"
        )
    from kernels import triton  # only here: a machine without a GPU need not have Triton

    return Backend("triton", triton.paged_attention, triton.write_kv, triton.copy_blocks, triton.allocate_caches)


def _cpu_backend(cpu_kernels: str, cache_dir: Path, told: Told) -> Backend:
    if cpu_kernels == "reference":
        return REFERENCE
    if cpu_kernels != "auto":
        try:
            return native_backend(cpu_kernels, cache_dir, told)
        except BuildError as error:
            raise KernelInputError(f"cpu_kernels: {error}") from error
    note = "there are no native kernels for this kind of CPU"
    for level in cpu.supported():
        try:
            return replace(native_backend(level, cache_dir, told), note=note if level != cpu.supported()[0] else "")
        except BuildError as error:
            note = str(error)
    return replace(REFERENCE, note=note)


def native_backend(level: str, cache_dir: Path = CACHE, told: Told = silent) -> Backend:
    """A CPU's native kernels of one level. Raises BuildError."""
    native = cpu.NativeKernels(level, cache_dir, told)
    return Backend(
        f"cpu {level}",
        native.paged_attention,
        native.write_kv,
        native.copy_blocks,
        native.allocate_caches,
        native.attend_projected,
        native.populate,
        native.touch_blocks,
        level=level,
    )
