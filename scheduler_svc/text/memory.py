"""Giving memory that the process no longer needs back to the system."""

import ctypes
import gc
import sys

import numpy as np

# Of glibc's mallopt, and what is set.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
KEPT_BYTES = 1 << 20  # what is freed beyond it at an arena's end goes back; what is larger never comes from one
ARENAS = 2
# What numpy keeps.
SMALL_BYTES, PIECES = 1024, 7


def keep_little_memory() -> None:
    """To be called before there are threads. The C library (glibc) gives each thread memory of its own to allocate
    from, and keeps at each one's end up to twice the largest piece that was ever freed."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, ARENAS)
        mallopt(_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)


def keep_numpys_pieces_together() -> None:
    """numpy keeps up to PIECES freed pieces of memory of each size below SMALL_BYTES, for good, wherever they are. A
    load of thousands of streams, whose arrays have all lengths while it comes and goes, leaves 4,000 of them, in as
    many pages. So numpy is given all that it will keep while there is one place for them, 3.6 MB."""
    arrays = [np.empty(num_bytes, np.uint8) for num_bytes in range(1, SMALL_BYTES) for _ in range(PIECES)]
    del arrays


def release_unused_memory() -> None:
    """Return freed memory to the system where the C library can (glibc), after something big has been dropped.

    Loading a tokenizer of 262,144 entries takes 300 MB for a second and 100 MB for good; without this the process
    would keep the 300.
    """
    gc.collect()
    gc.freeze()  # what is left stays, and no later collection has to look at it again
    give_back_freed_pages()


def give_back_spare_objects() -> None:
    """Python keeps thousands of small objects of which nobody has any more, for the next ones, wherever a load has left
    them, and their pages with them; a full collection lets go of them. Quick while nothing runs."""
    gc.collect()
    give_back_freed_pages()


def give_back_freed_pages() -> None:
    """Those that the C library keeps for itself, in the midst of others, too. From any thread."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
