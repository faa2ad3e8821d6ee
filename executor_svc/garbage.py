"""Counts messages that cannot be understood, and logs them without letting a peer fill the log."""

from collections import OrderedDict

import structlog

_REMEMBERED_PEERS = 1024
_SECONDS_BETWEEN_LINES = 0.1

_log = structlog.get_logger()


class GarbageCount:
    """A line for each peer's first bad message, ten lines a second at most."""

    def __init__(self) -> None:
        self.num_dropped = 0
        self._peers: OrderedDict[bytes, None] = OrderedDict()
        self._last_line = float("-inf")

    def drop(self, peer: bytes, num_bytes: int | None, now: float) -> None:
        """`num_bytes` None stands for a message of several frames."""
        self.num_dropped += 1
        if peer in self._peers or now - self._last_line < _SECONDS_BETWEEN_LINES:
            return
        self._last_line = now
        self._peers[peer] = None
        if len(self._peers) > _REMEMBERED_PEERS:
            self._peers.popitem(last=False)
        _log.warning("message_dropped", peer=peer.hex(), bytes=num_bytes, dropped_so_far=self.num_dropped)
