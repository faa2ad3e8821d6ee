"""What numpy keeps of freed arrays lies together, whatever comes to lie beside it later."""

import ctypes
import subprocess
import sys

import pytest

# Of each size of small arrays, as many as numpy keeps. Told: how many bytes the C library had to find for them.
TAKEN = """
import ctypes
import sys
import numpy as np
from scheduler_svc.text.memory import PIECES, SMALL_BYTES, keep_numpys_pieces_together

class Allocated(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    _fields_ = [(name, ctypes.c_size_t) for name in names]

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Allocated
if sys.argv[1] == "together":
    keep_numpys_pieces_together()
arrays = [None] * (PIECES * SMALL_BYTES)
before = mallinfo2().uordblks
for place in range(PIECES, len(arrays)):
    arrays[place] = np.empty(place // PIECES, np.uint8)
print(mallinfo2().uordblks - before)
"""
ALL_BYTES = 7 * sum(range(1, 1024))

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc alone tells")


def num_bytes_taken(*, together: bool) -> int:
    how = "together" if together else "anywhere"
    return int(subprocess.run([sys.executable, "-c", TAKEN, how], check=True, capture_output=True, text=True).stdout)


def test_arrays_of_all_lengths_are_made_of_pieces_that_were_there_before() -> None:
    assert num_bytes_taken(together=False) > ALL_BYTES / 2
    assert num_bytes_taken(together=True) < ALL_BYTES / 10
