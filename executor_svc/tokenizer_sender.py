"""Sends the tokenizer's bundle in pieces, so slowly that no step waits for it."""

import hashlib
from collections import OrderedDict

from executor_svc.router import Router, Sent
from paged.v1 import executor_pb2

CHUNK_BYTES = 256 << 10
CHUNKS_PER_TURN = 4
MAX_ASKERS = 64


class TokenizerSender:
    """One bundle for many askers, a few chunks in each turn of the service's loop."""

    def __init__(self, bundle: bytes, router: Router) -> None:
        self.bundle_hash = hashlib.sha256(bundle).hexdigest()
        self._router = router
        self._chunks = [
            executor_pb2.ToScheduler(
                tokenizer_chunk=executor_pb2.TokenizerChunk(
                    data=bundle[offset : offset + CHUNK_BYTES],
                    offset=offset,
                    total_bytes=len(bundle),
                    tokenizer_hash=self.bundle_hash,
                )
            ).SerializeToString()
            for offset in range(0, len(bundle), CHUNK_BYTES)
        ]
        self._next_chunk: OrderedDict[bytes, int] = OrderedDict()  # by peer

    def ask(self, peer: bytes) -> bool:
        """The peer will get the bundle from its begin. False where too many are being served already."""
        if peer not in self._next_chunk and len(self._next_chunk) >= MAX_ASKERS:
            return False
        self._next_chunk[peer] = 0
        return True

    def busy(self) -> bool:
        return bool(self._next_chunk)

    def send_some(self) -> None:
        """Up to CHUNKS_PER_TURN chunks, the askers in turn. One that is gone, or full, has to ask again."""
        for _ in range(min(CHUNKS_PER_TURN, len(self._chunks))):
            if not self._next_chunk:
                return
            peer, number = self._next_chunk.popitem(last=False)
            sent = self._router.send(peer, self._chunks[number])
            if sent is Sent.QUEUED and number + 1 < len(self._chunks):
                self._next_chunk[peer] = number + 1
