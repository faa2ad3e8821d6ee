"""Giving memory that the process no longer needs back to the system."""

import ctypes
import gc
import sys


def release_unused_memory() -> None:
    """Return freed memory to the system where the C library can (glibc), after something big has been dropped.

    Loading a tokenizer of 262,144 entries takes 300 MB for a second and 100 MB for good; without this the process
    would keep the 300.
    """
    gc.collect()
    gc.freeze()  # what is left stays, and no later collection has to look at it again
    give_back_freed_pages()


def give_back_freed_pages() -> None:
    """Those that the C library keeps for itself, in the midst of others, too. From any thread."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
