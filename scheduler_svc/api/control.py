"""The control service: what is served, how busy it is, how to stop a request, and what becomes of cached prefixes."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

import grpc.aio

from paged.v1 import control_pb2, control_pb2_grpc
from scheduler_svc.api import watching
from scheduler_svc.api.engine_face import Engine
from scheduler_svc.api.served import model_facts
from scheduler_svc.core.cache_events import CLEARED, STORED, Event, Told
from scheduler_svc.settings import SchedulerSettings

MAX_EVENTS = 8192  # in one message, some 300 kB


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """See control.proto. `ErrorBoundary` turns the exceptions raised here into statuses."""

    def __init__(self, engine: Engine, settings: SchedulerSettings) -> None:
        self._engine = engine
        self._settings = settings

    async def GetModel(
        self, request: control_pb2.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.GetModelResponse:
        return model_facts(self._engine.model(request.model), self._settings)

    async def ListModels(
        self, request: control_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.ListModelsResponse:
        models = [model_facts(model, self._settings) for model in self._engine.models]
        return control_pb2.ListModelsResponse(models=models)

    async def GetLoad(
        self, request: control_pb2.GetLoadRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.GetLoadResponse:
        return self._engine.load()

    async def Abort(
        self, request: control_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.AbortResponse:
        return control_pb2.AbortResponse(request_ids=self._engine.abort(list(request.request_ids)))

    async def FlushPrefixCache(
        self, request: control_pb2.FlushPrefixCacheRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.FlushPrefixCacheResponse:
        return control_pb2.FlushPrefixCacheResponse(blocks=self._engine.flush_prefix_cache())

    async def Watch(
        self, request: control_pb2.WatchRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[control_pb2.WatchResponse, None]:
        async with aclosing(watching.watch(self._engine, request)) as messages:
            async for message in messages:
                yield message

    async def GetBlockTables(
        self, request: control_pb2.GetBlockTablesRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.GetBlockTablesResponse:
        return watching.block_tables(self._engine, request)

    async def GetPrefixTree(
        self, request: control_pb2.GetPrefixTreeRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.GetPrefixTreeResponse:
        return await watching.prefix_tree(self._engine, request)

    async def WatchPrefixCache(
        self, request: control_pb2.WatchPrefixCacheRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[control_pb2.WatchPrefixCacheResponse, None]:
        async with aclosing(self._engine.watch_prefix_cache()) as told_anything:
            async for executor, told in told_anything:
                for message in _messages(executor, told):
                    yield message


def _messages(executor: str, told: Told) -> Iterator[control_pb2.WatchPrefixCacheResponse]:
    for begin in range(0, max(len(told.events), 1), MAX_EVENTS):
        yield control_pb2.WatchPrefixCacheResponse(
            executor=executor,
            number=told.number,
            starts_anew=told.starts_anew and begin == 0,
            missed=told.num_missed if begin == 0 else 0,
            events=map(_event, told.events[begin : begin + MAX_EVENTS]),
        )


def _event(event: Event) -> control_pb2.PrefixCacheEvent:
    kind, digest = event
    if kind == CLEARED:
        return control_pb2.PrefixCacheEvent(cleared=control_pb2.PrefixCacheEvent.Cleared())
    if kind == STORED:
        return control_pb2.PrefixCacheEvent(stored=digest)
    return control_pb2.PrefixCacheEvent(removed=digest)
