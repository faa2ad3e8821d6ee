"""The prefix cache as a tree, for people: which block continues which."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Links:
    """The cached blocks: their hashes (uint8 [n, 32]), those that they continue (each as Python's hash of it: 0 of one
    that begins a prompt), and how many tables hold them."""

    blocks: NDArray[np.int64]
    digests: NDArray[np.uint8]
    parents: NDArray[np.int64]
    counts: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """A cached block. `parent` is the place in the tree's list of the block that it continues, -1 for one that begins a
    prompt or whose beginning is gone; `count` tables hold it; `depth` blocks of the tree are before it."""

    digest: bytes
    parent: int
    block: int
    count: int
    depth: int


def prefix_tree(links: Links, most: int) -> list[PrefixNode]:
    """At most so many blocks, each after the one that it continues, what most blocks continue first."""
    digests = [digest.tobytes() for digest in links.digests]
    index_of = {hash(digest): index for index, digest in enumerate(digests)}
    children: dict[int, list[int]] = {}
    roots = []
    for index, parent in enumerate(links.parents.tolist()):
        above = index_of.get(parent)
        if above is None:
            roots.append(index)
        else:
            children.setdefault(above, []).append(index)
    sizes = _sizes(roots, children)
    nodes: list[PrefixNode] = []
    waiting = [(root, -1, 0) for root in sorted(roots, key=sizes.__getitem__)]  # the last of them is next
    while waiting and len(nodes) < most:
        index, place_above, depth = waiting.pop()
        nodes.append(PrefixNode(digests[index], place_above, int(links.blocks[index]), int(links.counts[index]), depth))
        place = len(nodes) - 1
        below = sorted(children.get(index, ()), key=sizes.__getitem__)
        waiting.extend((child, place, depth + 1) for child in below)
    return nodes


def _sizes(roots: Sequence[int], children: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """By index, how many blocks the tree below it has, itself included."""
    order = list(roots)
    for index in order:  # grows meanwhile
        order.extend(children.get(index, ()))
    sizes = dict.fromkeys(order, 1)
    for index in reversed(order):
        sizes[index] += sum(sizes[child] for child in children.get(index, ()))
    return sizes
