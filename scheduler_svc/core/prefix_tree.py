"""The prefix cache as a tree, for people: which block continues which."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """A cached block. `parent` is the place in the tree's list of the block that it continues, -1 for one that begins a
    prompt or whose beginning is gone; `count` tables hold it; `depth` blocks of the tree are before it."""

    digest: bytes
    parent: int
    block: int
    count: int
    depth: int


def prefix_tree(
    hash_of: Mapping[int, bytes], parent_of: Mapping[int, bytes], counts: Sequence[int], most: int
) -> list[PrefixNode]:
    """At most so many blocks, each after the one that it continues, what most blocks continue first. `hash_of` and
    `parent_of` are by block, as `PrefixCache.links` gives them; `counts` says how many tables hold a block."""
    block_of = {digest: block for block, digest in hash_of.items()}
    children: dict[int, list[int]] = {}
    roots = []
    for block, parent in parent_of.items():
        above = block_of.get(parent)
        if above is None:
            roots.append(block)
        else:
            children.setdefault(above, []).append(block)
    sizes = _sizes(roots, children)
    nodes: list[PrefixNode] = []
    waiting = [(root, -1, 0) for root in sorted(roots, key=sizes.__getitem__)]  # the last of them is next
    while waiting and len(nodes) < most:
        block, parent_index, depth = waiting.pop()
        nodes.append(PrefixNode(hash_of[block], parent_index, block, counts[block], depth))
        index = len(nodes) - 1
        below = sorted(children.get(block, ()), key=sizes.__getitem__)
        waiting.extend((child, index, depth + 1) for child in below)
    return nodes


def _sizes(roots: Sequence[int], children: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """By block, how many blocks the tree below it has, itself included."""
    order = list(roots)
    for block in order:  # grows meanwhile
        order.extend(children.get(block, ()))
    sizes = dict.fromkeys(order, 1)
    for block in reversed(order):
        sizes[block] += sum(sizes[child] for child in children.get(block, ()))
    return sizes
