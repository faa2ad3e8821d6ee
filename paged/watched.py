"""What a watcher keeps of what it is told: the state of every block, put together from changes."""

from collections import Counter
from typing import NamedTuple

from paged.v1 import control_pb2

NOT_LENT, BLANK, CACHED = range(3)
HELD_BY_NONE = 2  # a block that c tables hold is HELD_BY_NONE + c
MAX_BLOCKS = 1 << 28  # more than any executor has: a larger number is no number of blocks


class BlockCounts(NamedTuple):
    not_lent: int
    blank: int
    cached: int
    used: int
    shared: int  # of the used ones


class BlockStates:
    """Of all executors, by endpoint: a byte for each block, as `BlockRun` in control.proto has them."""

    def __init__(self) -> None:
        self.of: dict[str, bytearray] = {}
        self._sessions: dict[str, int] = {}

    def apply(self, message: control_pb2.WatchResponse) -> None:
        """Take in the next message of the stream. Raises ValueError where it cannot be one."""
        states: dict[str, bytearray] = {}
        for executor in message.executors:
            if executor.num_blocks > MAX_BLOCKS:
                raise ValueError(f"num_blocks: is {executor.num_blocks}; at most {MAX_BLOCKS} can be shown")
            column = bytearray(executor.num_blocks)
            if self._sessions.get(executor.endpoint) == executor.session:
                before = self.of.get(executor.endpoint, b"")[: executor.num_blocks]
                column[: len(before)] = before
            for run in executor.runs:
                if run.begin + len(run.states) > executor.num_blocks:
                    raise ValueError(f"runs: one ends behind block {executor.num_blocks}, the last there is")
                column[run.begin : run.begin + len(run.states)] = run.states
            states[executor.endpoint] = column
        self.of = states
        self._sessions = {executor.endpoint: executor.session for executor in message.executors}


def counts_of(states: bytes | bytearray) -> BlockCounts:
    """How many blocks are in which state."""
    found = Counter(states)
    used = sum(count for state, count in found.items() if state > HELD_BY_NONE)
    return BlockCounts(found[NOT_LENT], found[BLANK], found[CACHED], used, used - found[HELD_BY_NONE + 1])
