"""Weights that lie in a file's memory (as safetensors are loaded) stay in this process's after they were packed, until
the last tensor of that file is gone. Here their pages are given back one by one."""

import ctypes
import mmap
from collections.abc import Iterable
from pathlib import Path

import torch

_MADV_DONTNEED = 4  # asm-generic/mman-common.h


def give_back(tensors: Iterable[torch.Tensor]) -> None:
    """Let go of the pages of tensors that nobody reads again. Only of those that a file could give once more, so that
    even a reader that was overlooked would find what it looks for. Does nothing on other systems than Linux."""
    mapped = _file_mappings()
    for tensor in tensors:
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end and any(first <= begin and end <= last for first, last in mapped):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_DONTNEED)


def _file_mappings() -> list[tuple[int, int]]:
    """Where files lie in memory. Of tensors none but weights can be there, whatever their file is called: in the hub's
    cache by a hash."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    fields = [line.split(None, 5) for line in lines]  # span, rights, offset, device, inode, path
    files = [span for span, *_, path in fields if path.startswith("/") and not path.endswith(" (deleted)")]
    return [(int(first, 16), int(last, 16)) for first, last in (span.split("-") for span in files)]
