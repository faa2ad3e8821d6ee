"""Modules of a transformers model that are understood, computed by native kernels.

A module is recognised by its structure, never by its family's name, and proved by its results; what cannot be proved
keeps its own code. A replaced module stays where it is, with its attributes: only its `forward` is another, and the
weights that this has taken over are gone from it, so that no weight is kept twice.
"""

from executor_svc.model.fused.output import GreedyHead, HeadRule
from executor_svc.model.fused.packed_head import packed_head
from executor_svc.model.fused.products import Products
from executor_svc.model.fused.recipe import Replaced
from executor_svc.model.fused.replace import Fused, OtherResults, Recipe, fuse, fuse_again
from executor_svc.model.fused.wanted import Wanted

__all__ = [
    "Fused",
    "GreedyHead",
    "HeadRule",
    "OtherResults",
    "Products",
    "Recipe",
    "Replaced",
    "Wanted",
    "fuse",
    "fuse_again",
    "packed_head",
]
