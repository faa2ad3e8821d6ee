"""What people who look on may ask for, by gRPC or on the block map page: checked, and answered by the engine."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from paged.v1 import control_pb2
from scheduler_svc.api.caller import CALLER
from scheduler_svc.api.engine_face import Engine
from scheduler_svc.errors import FieldViolation, InvalidRequest

PERIOD_MS, MIN_PERIOD_MS, MAX_PERIOD_MS = 500, 100, 60_000
REQUESTS, MAX_REQUESTS = 100, 1000
PREFIX_BLOCKS, MAX_PREFIX_BLOCKS = 1000, 10_000


async def watch(engine: Engine, request: control_pb2.WatchRequest) -> AsyncGenerator[control_pb2.WatchResponse, None]:
    """Raises InvalidRequest, TooManyWatchers."""
    period_ms = request.period_ms if request.HasField("period_ms") else PERIOD_MS
    max_requests = request.max_requests if request.HasField("max_requests") else REQUESTS
    _check("period_ms", period_ms, MIN_PERIOD_MS, MAX_PERIOD_MS)
    _check("max_requests", max_requests, 0, MAX_REQUESTS)
    async with aclosing(engine.watch.messages(period_ms / 1000, max_requests, CALLER.get().tenant)) as messages:
        async for message in messages:
            yield message


def block_tables(engine: Engine, request: control_pb2.GetBlockTablesRequest) -> control_pb2.GetBlockTablesResponse:
    """Raises NotThere."""
    return engine.watch.block_tables(request.request_id, CALLER.get().tenant)


async def prefix_tree(engine: Engine, request: control_pb2.GetPrefixTreeRequest) -> control_pb2.GetPrefixTreeResponse:
    """Raises InvalidRequest, NotThere."""
    max_blocks = request.max_blocks if request.HasField("max_blocks") else PREFIX_BLOCKS
    _check("max_blocks", max_blocks, 1, MAX_PREFIX_BLOCKS)
    return await engine.watch.prefix_tree(request.executor, max_blocks)


def _check(field: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidRequest(FieldViolation(field, f"is {value}; must be in [{least}, {most}]"))
