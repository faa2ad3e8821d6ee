"""The cached blocks and the load, as a gateway follows them to send a prompt where its prefix is."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from itertools import islice

from smg_grpc_proto.generated import common_pb2 as common

from scheduler_svc.api.vllm_loads import LoadRecords
from scheduler_svc.block_watch import BlockChanges
from scheduler_svc.core.cache_events import CachedBlock

LOAD_TICK_S = 0.1
MAX_BLOCKS = 4096  # in one message; of 16 tokens each some 300 kB


class KvEventStream:
    """All that one subscriber is told. `numbered_from` is the number of the first message that has events.

    The subscriber is told first to forget what it knew, as a snapshot of no blocks; then each block that is cached;
    then each change. Messages about load alone repeat the number of the last one.
    """

    def __init__(self, records: LoadRecords, numbered_from: int, num_unknown: int, *, load_comes_first: bool) -> None:
        self._records = records
        self._number = max(numbered_from, 1) - 1
        self._num_unknown = num_unknown
        self._event_id = 0
        self._load_comes_first = load_comes_first

    async def messages(self, changes: AsyncGenerator[BlockChanges, None]) -> AsyncGenerator[common.KvEventBatch, None]:
        """Until the caller closes it, `changes` with it. Raises what `changes` raises."""
        if self._load_comes_first and (record := self._records.due()) is not None:
            yield self._alone(record)
        yield self._beginning()
        news = asyncio.ensure_future(anext(changes))
        try:
            while True:
                await asyncio.wait([news], timeout=LOAD_TICK_S)
                if news.done():
                    for events in self._batches(news.result()):
                        yield self._batch(events)
                    news = asyncio.ensure_future(anext(changes))
                elif (record := self._records.due()) is not None:
                    yield self._alone(record)
        finally:
            news.cancel()
            await asyncio.wait([news])
            await changes.aclose()

    def _alone(self, record: common.EngineLoad) -> common.KvEventBatch:
        return common.KvEventBatch(sequence_number=self._number, timestamp=time.time(), load=record)

    def _beginning(self) -> common.KvEventBatch:
        batch = self._batch([common.KvCacheEvent(cleared=common.KvCacheCleared())])
        batch.snapshot.CopyFrom(common.KvSnapshotChunk(count=1, unknown_before=self._num_unknown))
        return batch

    def _batch(self, events: list[common.KvCacheEvent]) -> common.KvEventBatch:
        self._number += 1
        for event in events:
            self._event_id += 1
            event.event_id = self._event_id
        return common.KvEventBatch(
            sequence_number=self._number, timestamp=time.time(), events=events, load=self._records.record()
        )

    def _batches(self, changes: BlockChanges) -> Iterator[list[common.KvCacheEvent]]:
        removed = iter(changes.removed)
        while some := [_hash(digest) for digest in islice(removed, MAX_BLOCKS)]:
            yield [common.KvCacheEvent(removed=common.KvBlocksRemoved(block_hashes=some))]
        stored = iter(changes.stored.items())
        while blocks := list(islice(stored, MAX_BLOCKS)):
            yield [common.KvCacheEvent(stored=chain) for chain in _chains(blocks)]


def _chains(blocks: list[tuple[bytes, CachedBlock]]) -> Iterator[common.KvBlocksStored]:
    """Neighbours of which each is behind the one before are told together."""
    chain: common.KvBlocksStored | None = None
    last: bytes | None = None
    for digest, block in blocks:
        if chain is None or block.parent is None or block.parent != last:
            if chain is not None:
                yield chain
            parent = None if block.parent is None else _hash(block.parent)
            chain = common.KvBlocksStored(parent_block_hash=parent, tier=common.KV_CACHE_TIER_DEVICE)
        ids = memoryview(block.token_bytes).cast("i").tolist()
        chain.blocks.add(block_hash=_hash(digest), token_ids=ids, block_size=len(ids))
        last = digest
    if chain is not None:
        yield chain


def _hash(digest: bytes) -> int:
    """The gateway knows a block by 64 bits."""
    return int.from_bytes(digest[:8], "little", signed=True)
