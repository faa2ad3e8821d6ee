"""The control service: what is served, how busy it is, and how to stop a request."""

import grpc.aio

from paged.v1 import control_pb2, control_pb2_grpc
from scheduler_svc.api.engine_face import Engine
from scheduler_svc.api.served import served_limits, served_model
from scheduler_svc.settings import SchedulerSettings


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """See control.proto. `ErrorBoundary` turns the exceptions raised here into statuses."""

    def __init__(self, engine: Engine, settings: SchedulerSettings) -> None:
        self._engine = engine
        self._settings = settings

    async def GetModel(
        self, request: control_pb2.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.GetModelResponse:
        facts = served_model(self._engine)
        return control_pb2.GetModelResponse(
            model=facts.name,
            architecture=facts.architecture,
            vocab_size=facts.vocab_size,
            max_model_len=served_limits(self._engine, self._settings).max_model_len,
            eos_token_ids=facts.eos_token_ids,
            bos_token_id=facts.bos_token_id if facts.HasField("bos_token_id") else None,
            dtype=facts.dtype,
            has_chat_template=self._engine.has_chat_template,
            fingerprint=facts.fingerprint,
            block_size=facts.block_size,
        )

    async def GetLoad(
        self, request: control_pb2.GetLoadRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.GetLoadResponse:
        return self._engine.load()

    async def Abort(
        self, request: control_pb2.AbortRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.AbortResponse:
        return control_pb2.AbortResponse(request_ids=self._engine.abort(list(request.request_ids)))
