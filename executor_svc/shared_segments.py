"""Which rows of a step have blocks in common, so that these can be read once for all of them.

Rows whose tables begin with the same blocks form segments: runs of blocks that the same rows have at the same places.
They are taken from the tree of tables, which follows the tables' changes; nobody compares rows, and while nothing
changes the columns of the step before serve again.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from executor_svc.step import Int32s, SharedSegments, Step
from executor_svc.table_tree import ROOT, TableTree

MIN_SAVED_TOKENS = 64
"""Of context that a segment spares its rows the reading of, for each of them. A row in a segment has one result more to
merge; on a CPU that took as long as to attend to 50 to 100 tokens (`python -m benchmarks.shared_blocks --smallest`)."""


class SegmentFinder:
    """Follows the resident rows' tables. What changes is noted at once and looked at when segments are asked for."""

    def __init__(self, num_rows: int, block_size: int, min_saved_tokens: int = MIN_SAVED_TOKENS) -> None:
        self._tree = TableTree(num_rows)
        self._block_size = block_size
        self._min_saved_blocks = min_saved_tokens / block_size
        self._changed: set[int] = set()
        self._last_nodes = b""
        self._last_changes = -1
        self._last: SharedSegments | None = None

    def changed(self, rows: Iterable[int]) -> None:
        """These rows have begun, ended, or other blocks at places where they had some."""
        self._changed.update(map(int, rows))

    def grown(self, rows: Int32s) -> None:
        """These rows have more blocks than before."""
        if len(affected := self._tree.affected_by_growth(rows)):
            self.changed(affected)

    def find(
        self, rows: Int32s, num_tokens: Int32s, context_lens: Int32s, tables: Int32s, num_blocks: Int32s
    ) -> SharedSegments | None:
        """Of a step's rows, each of which computes `num_tokens` and then has `context_lens`. `tables` and `num_blocks`
        are all resident rows'. None where nothing is shared.

        Only rows that compute one token are members; and only of blocks that were full before it, which for a
        scheduler that never writes to a shared block is all that they share. A row that shares more shares nothing.
        """
        if self._changed:
            self._tree.replace(self._changed, tables, num_blocks)
            self._changed.clear()
        if not self._tree.has_nodes:
            return None
        nodes = self._tree.node_of.take(rows)
        fits = self._tree.end.take(nodes) <= (context_lens - 1) // self._block_size
        nodes[(num_tokens != 1) | ~fits] = ROOT
        if not nodes.any():
            return None
        key = nodes.tobytes()
        if key != self._last_nodes or self._tree.changes != self._last_changes:
            self._last_nodes, self._last_changes = key, self._tree.changes
            self._last = _segments(self._tree, nodes, self._min_saved_blocks)
        return self._last


def merge_segments(steps: Sequence[Step]) -> SharedSegments | None:
    """Those of one step over the rows of all. Each session has blocks of its own, so none are shared between steps."""
    if all(step.shared is None for step in steps):
        return None
    parts = [step.shared or _none_shared(len(step.rows)) for step in steps]
    rows_before = np.cumsum([0, *(len(step.rows) for step in steps)], dtype=np.int32)
    members_before = np.cumsum([0, *(len(part.rows) for part in parts)], dtype=np.int32)
    starts = [part.row_start[:-1] + before for part, before in zip(parts, members_before[:-1], strict=True)]
    return SharedSegments(
        np.concatenate([part.first for part in parts]),
        np.concatenate([part.end for part in parts]),
        np.concatenate([*starts, members_before[-1:]]),
        np.concatenate([part.rows + before for part, before in zip(parts, rows_before[:-1], strict=True)]),
        np.concatenate([part.own_start for part in parts]),
    )


def _none_shared(num_rows: int) -> SharedSegments:
    nothing = np.empty(0, np.int32)
    return SharedSegments(nothing, nothing, np.zeros(1, np.int32), nothing, np.zeros(num_rows, np.int32))


def _segments(tree: TableTree, nodes: Int32s, min_saved: float) -> SharedSegments | None:
    """`nodes` has the last node of each row of the step, ROOT for those that take no part."""
    node_ids, places = _all_nodes(tree, nodes)
    order = np.lexsort((places, node_ids, tree.first.take(node_ids)))  # parents before their children
    node_ids, places = node_ids[order], places[order]
    starts = np.flatnonzero(np.diff(node_ids, prepend=ROOT))
    num_rows = np.diff(starts, append=len(node_ids))
    kept, first = _worth_it(tree, node_ids[starts].tolist(), num_rows.tolist(), min_saved)
    if not len(kept):
        return None
    num_rows = num_rows[kept]
    row_start = np.zeros(len(kept) + 1, np.int32)
    np.cumsum(num_rows, out=row_start[1:])
    end = tree.end.take(node_ids[starts[kept]])
    members = np.concatenate([places[start : start + num] for start, num in zip(starts[kept], num_rows, strict=True)])
    own_start = np.zeros(len(nodes), np.int32)
    own_start[members] = end.repeat(num_rows)  # of a row's segments the last one counts
    return SharedSegments(np.array(first, np.int32), end, row_start, members.astype(np.int32), own_start)


def _all_nodes(tree: TableTree, nodes: Int32s) -> tuple[Int32s, NDArray[np.intp]]:
    """Each pair of a node and a row of the step that is below it."""
    places = nodes.nonzero()[0]
    found: list[tuple[Int32s, NDArray[np.intp]]] = []
    while len(places):
        nodes = nodes[nodes != ROOT]
        found.append((nodes, places))
        nodes = tree.parent.take(nodes)
        places = places[nodes != ROOT]
    return np.concatenate([ids for ids, _ in found]), np.concatenate([places for _, places in found])


def _worth_it(
    tree: TableTree, nodes: list[int], num_rows: list[int], min_saved: float
) -> tuple[NDArray[np.intp], list[int]]:
    """Which nodes, given parents first with the rows that each has in the step, make a segment, and its first place.

    A node that makes none leaves its blocks to those below it: because one of these has all of its rows, or because
    too few blocks would be saved, `min_saved` for each row.
    """
    num_rows_of = dict(zip(nodes, num_rows, strict=True))
    inherited = {parent for node in nodes if num_rows_of[node] == num_rows_of.get(parent := int(tree.parent[node]))}
    kept, first = [], []
    left_from: dict[int, int] = {}  # of nodes that make no segment: where the blocks begin that they leave
    for i, node in enumerate(nodes):
        begin = left_from.get(int(tree.parent[node]), int(tree.first[node]))
        saved = (num_rows[i] - 1) * (int(tree.end[node]) - begin)
        if node in inherited or num_rows[i] < 2 or saved < min_saved * num_rows[i]:
            left_from[node] = begin
        else:
            kept.append(i)
            first.append(begin)
    return np.array(kept, np.intp), first
