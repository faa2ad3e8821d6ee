"""Columns of numbers that Python code reads one by one and numpy all at once.

Their memory is taken, page by page, when they are made: what the system gives only when it is first written to would be
missing from a process's memory until a load comes.
"""

from array import array
from typing import Any

import numpy as np


def zeros(kind: str, size: int) -> "array[int]":
    """`kind` as in `array`: "b" for one byte each, "i" for four, "q" for eight."""
    return array(kind, [0]) * size


def lengthened(old: "array[int]", size: int) -> "array[int]":
    """The same with zeros behind it, unless it is as long. Views of the old one are of no use any more."""
    return old if size <= len(old) else old + zeros(old.typecode, size - len(old))


def view(flat: "array[int]") -> "np.ndarray[Any, np.dtype[Any]]":
    """The same memory. As long as the view is there the column cannot change its length."""
    return np.frombuffer(flat, flat.typecode)
