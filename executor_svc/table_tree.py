"""The rows' block tables as a tree: rows whose tables begin with the same blocks are below the same nodes.

A node stands for a run of blocks that two rows or more have in their tables, after the same blocks; where their tables
part, there the next nodes are, or rows alone. What a row has behind its last node is not held here but in its table, so
a table that grows changes nothing, unless it ended where others go on.
"""

from collections.abc import Iterable

import numpy as np

from executor_svc.step import Int32s

ROOT = 0  # no blocks; every row is below it
_NOWHERE = -1
_FIRST_NUM_NODES = 16


class TableTree:
    """Knows rows by their number; their tables, which it reads when they are put in, are the caller's.

    `changes` differs whenever a node has other blocks, another parent or other rows than before.
    """

    def __init__(self, num_rows: int) -> None:
        self.changes = 0
        self.node_of: Int32s = np.full(num_rows, ROOT, np.int32)  # the last node that a row is below
        self.parent: Int32s = np.zeros(_FIRST_NUM_NODES, np.int32)
        self.first: Int32s = np.zeros(_FIRST_NUM_NODES, np.int32)  # places in a table: a node has first : end
        self.end: Int32s = np.zeros(_FIRST_NUM_NODES, np.int32)
        self._is_in = np.zeros(num_rows, np.bool_)
        self._ends = np.ones(num_rows, np.bool_)  # rows without a block behind their node; so, too, those not in here
        self._keys = [0] * num_rows  # of the others: that block
        self._blocks: list[Int32s] = [np.empty(0, np.int32)]  # of each node
        self._children: list[dict[int, int]] = [{}]  # of each node, by their first block: a node, or ~row
        self._ending: list[set[int]] = [set()]  # of each node: the rows that end there
        self._free: list[int] = []

    @property
    def has_nodes(self) -> bool:
        """Whether any two rows begin with the same block."""
        return len(self._blocks) - len(self._free) > 1

    def affected_by_growth(self, rows: Int32s) -> Int32s:
        """Those of the rows that must be put in anew when their tables have grown."""
        return rows[self._ends.take(rows)]

    def replace(self, rows: Iterable[int], tables: Int32s, num_blocks: Int32s) -> None:
        """Put in anew the rows, each once, with their tables as they are now: `tables[row, : num_blocks[row]]`.

        Those without blocks are left out. No other row's table may have changed, but by growing.
        """
        rows = list(rows)
        for row in rows:
            self._remove(row)
        for row in rows:
            if num_blocks[row]:
                self._insert(row, tables, num_blocks)

    def _insert(self, row: int, tables: Int32s, num_blocks: Int32s) -> None:
        table = tables[row, : num_blocks[row]]
        node = ROOT
        while (place := int(self.end[node])) < len(table):
            child = self._children[node].get(int(table[place]))
            if child is None:
                break
            if child < 0:
                other = tables[~child, place : num_blocks[~child]]
                node = self._new_node(node, other[: _num_equal(table[place:], other)])
                self._put(~child, node, tables[~child, : num_blocks[~child]])
            else:
                blocks = self._blocks[child]
                common = _num_equal(table[place:], blocks)
                node = child if common == len(blocks) else self._split(child, common)
        self._put(row, node, table)

    def _put(self, row: int, node: int, table: Int32s) -> None:
        """The node is the last one that has the row's blocks."""
        place = int(self.end[node])
        ends = place == len(table)
        if ends:
            self._ending[node].add(row)
        else:
            self._keys[row] = int(table[place])
            self._children[node][self._keys[row]] = ~row
        self.node_of[row], self._ends[row], self._is_in[row] = node, ends, True
        self.changes += node != ROOT

    def _remove(self, row: int) -> None:
        if not self._is_in[row]:
            return
        node = int(self.node_of[row])
        if self._ends[row]:
            self._ending[node].discard(row)
        else:
            del self._children[node][self._keys[row]]
        self.node_of[row], self._ends[row], self._is_in[row] = ROOT, True, False
        self.changes += node != ROOT
        if node != ROOT and len(self._children[node]) + len(self._ending[node]) == 1:
            self._dissolve(node)

    def _dissolve(self, node: int) -> None:
        """What remains below the node takes its place."""
        parent, key = int(self.parent[node]), int(self._blocks[node][0])
        if self._ending[node]:
            heir = ~self._ending[node].pop()
        else:
            (heir,) = self._children[node].values()
        self._children[parent][key] = heir
        if heir < 0:
            self.node_of[~heir], self._ends[~heir], self._keys[~heir] = parent, False, key
        else:
            self.parent[heir], self.first[heir] = parent, self.first[node]
            self._blocks[heir] = np.concatenate([self._blocks[node], self._blocks[heir]])
        self._children[node] = {}
        self._free.append(node)

    def _split(self, node: int, length: int) -> int:
        """The node keeps its blocks from `length` on; returns a new one above it with those before."""
        blocks = self._blocks[node]
        upper = self._new_node(int(self.parent[node]), blocks[:length])
        self.parent[node], self.first[node] = upper, self.end[upper]
        self._blocks[node] = blocks[length:]
        self._children[upper][int(blocks[length])] = node
        return upper

    def _new_node(self, parent: int, blocks: Int32s) -> int:
        if self._free:
            node = self._free.pop()
        else:
            node = len(self._blocks)
            self._blocks.append(blocks)
            self._children.append({})
            self._ending.append(set())
            if node == len(self.parent):
                self.parent, self.first, self.end = (
                    np.concatenate([column, np.zeros_like(column)]) for column in (self.parent, self.first, self.end)
                )
        self._blocks[node] = blocks.copy()
        self.parent[node], self.first[node] = parent, self.end[parent]
        self.end[node] = self.end[parent] + len(blocks)
        self._children[parent][int(blocks[0])] = node
        return node


def _num_equal(one: Int32s, other: Int32s) -> int:
    """How many entries the two have in common before they part."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    place = int(differs.argmax()) if length else 0
    return place if length and differs[place] else length
