"""The inference service: requests in, answers out."""

import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import grpc.aio

from paged.channel import SCHEDULER_KEY
from paged.v1 import inference_pb2, inference_pb2_grpc
from scheduler_svc.api import validation
from scheduler_svc.api.call_limits import CallLimits
from scheduler_svc.api.deadline import Deadline
from scheduler_svc.api.engine_face import Engine
from scheduler_svc.api.generate_many import ManyGenerations
from scheduler_svc.api.generating import GeneratingServicer, Saying, tokenized
from scheduler_svc.api.large_requests import LARGE_BYTES
from scheduler_svc.api.responses import to_response
from scheduler_svc.api.served import limits_of
from scheduler_svc.api.wire import without
from scheduler_svc.requests import Delta, GenerationRequest
from scheduler_svc.settings import SchedulerSettings


class InferenceServicer(GeneratingServicer, inference_pb2_grpc.InferenceServiceServicer):
    """See inference.proto. `ErrorBoundary` turns the exceptions raised here into statuses."""

    def __init__(self, engine: Engine, settings: SchedulerSettings, limits: CallLimits) -> None:
        super().__init__(engine, settings)
        self._limits = limits
        self._many: set[ManyGenerations] = set()
        self._name = secrets.token_hex(8)  # not the id that is configured: two may be given the same

    async def _begin(
        self, request: inference_pb2.GenerateRequest, deadline: Deadline
    ) -> tuple[GenerationRequest, Saying]:
        generation = await self._accepted(request, deadline)

        def say(delta: Delta) -> tuple[inference_pb2.GenerateResponse]:
            return (to_response(generation.request_id, delta),)

        return generation, say

    def check_unread(self, data: bytes) -> None:
        """Refuses a large GenerateRequest whose text is certain to be too long for the model, by its bytes alone.

        Raises InvalidRequest, DecodeError, and what `Engine.model` does.
        """
        cut = without(data, inference_pb2.GenerateRequest.TEXT_FIELD_NUMBER)
        if cut is None:
            return
        rest, num_text_bytes = cut
        if len(rest) >= LARGE_BYTES:  # to read this is what such requests wait for each other for
            return
        request = inference_pb2.GenerateRequest.FromString(rest)
        if request.WhichOneof("prompt") is None and not request.HasField("truncate_prompt_tokens"):
            self._engine.model(request.model).check_text_bytes(num_text_bytes)

    async def GenerateMany(
        self, requests: AsyncIterator[inference_pb2.GenerateManyRequest], context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[inference_pb2.GenerateManyResponse, None]:
        await context.send_initial_metadata(((SCHEDULER_KEY, self._name),))
        many = ManyGenerations(self._engine, self._accepted, self._limits, self._settings.max_request_s)
        self._many.add(many)
        try:
            async with aclosing(many.messages(requests)) as messages:
                async for message in messages:
                    yield message
        finally:
            self._many.discard(many)

    def close_many(self) -> None:
        """Have the clients of GenerateMany begin no more in the calls that are open, which end with their answers."""
        for many in self._many:
            many.close()

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        deadline = Deadline.of(context, self._settings.max_request_s)
        model = self._engine.model(request.model)
        validation.check_tokenize(request, limits_of(model, self._settings), has_chat_template=model.has_chat_template)
        return inference_pb2.TokenizeResponse(token_ids=await deadline.bounded(tokenized(request, model)))

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.DetokenizeResponse:
        deadline = Deadline.of(context, self._settings.max_request_s)
        model = self._engine.model(request.model)
        validation.check_detokenize(request, limits_of(model, self._settings))
        skip = request.skip_special_tokens or not request.HasField("skip_special_tokens")
        text = await deadline.bounded(model.detokenize(list(request.token_ids), skip))
        return inference_pb2.DetokenizeResponse(text=text)
