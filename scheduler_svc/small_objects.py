"""Where Python's small objects lie: in its own arenas, or among what the C library has.

Python takes an arena of a megabyte at a time, and gives it back when nothing in it lives. The objects of thousands of
streams fill dozens of them; when these have ended, most arenas hold a counter that was written meanwhile, a timer,
gRPC's wait for the next call. The C library gives back single pages, and is slower: some 3 % of a scheduler's time, and
much more with as many calls as streams. So it has the objects that are made while there come to be more streams, which
are those that last, and not what comes and goes with each message.

Objects are freed to where they came from, however new ones are allocated: what lies in no arena is the C library's.
"""

import ctypes
import sys

MANY = 64  # requests at once
FEW = MANY // 4

_RAW, _DOMAINS = 0, (1, 2)  # of PyMem_GetAllocator: what the C library has, and both kinds of small objects


class _Allocator(ctypes.Structure):
    """PyMemAllocatorEx."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("ctx", "malloc", "calloc", "realloc", "free")]


class SmallObjects:
    """Of the process. New ones are in arenas, but while there come to be more requests than there were, above MANY;
    these are counted anew once FEW are left. They stay in arenas where Python does not allocate as it does unless told
    otherwise (PYTHONMALLOC, tracemalloc)."""

    def __init__(self) -> None:
        raw = _allocator(_RAW)
        self._in_arenas = {domain: _allocator(domain) for domain in _DOMAINS}
        self._in_pages = {domain: _with_malloc_of(raw, own) for domain, own in self._in_arenas.items()}
        self._are_in_pages = False
        self._can_move = all(_is_pythons_own(own, raw) for own in self._in_arenas.values())
        self._most = 0

    def note(self, num_live: int) -> None:
        """So many requests are live. To be told again and again."""
        become_more = num_live > max(self._most, MANY)
        if become_more or num_live <= FEW:
            self._most = num_live
        if become_more and not self._are_in_pages:
            self._move(self._in_arenas, self._in_pages)
        elif self._are_in_pages and not become_more:
            self._move(self._in_pages, self._in_arenas)

    def _move(self, old: dict[int, _Allocator], new: dict[int, _Allocator]) -> None:
        """Not where somebody else has hooks by now."""
        if not self._can_move or any(bytes(_allocator(domain)) != bytes(old[domain]) for domain in _DOMAINS):
            return
        for domain in _DOMAINS:
            ctypes.pythonapi.PyMem_SetAllocator(domain, ctypes.byref(new[domain]))
        self._are_in_pages = not self._are_in_pages


def _allocator(domain: int) -> _Allocator:
    found = _Allocator()
    ctypes.pythonapi.PyMem_GetAllocator(domain, ctypes.byref(found))
    return found


def _with_malloc_of(raw: _Allocator, own: _Allocator) -> _Allocator:
    return _Allocator(raw.ctx, raw.malloc, raw.calloc, own.realloc, own.free)


def _is_pythons_own(own: _Allocator, raw: _Allocator) -> bool:
    """Whether it frees what is not in its arenas as the C library's, as it must, for larger objects are there. Hooks
    have a context. From 3.13 on it may be mimalloc, which does not, and cannot be told apart."""
    is_known = sys.implementation.name == "cpython" and sys.version_info < (3, 13)
    return is_known and not own.ctx and not raw.ctx and own.malloc != raw.malloc
