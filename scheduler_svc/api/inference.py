"""The inference service: requests in, answers out."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable

import grpc.aio

from paged.v1 import inference_pb2, inference_pb2_grpc
from scheduler_svc.api import validation
from scheduler_svc.api.accepted import generation_request
from scheduler_svc.api.deadline import Deadline
from scheduler_svc.api.engine_face import Engine, Model
from scheduler_svc.api.responses import merge, to_response
from scheduler_svc.api.served import limits_of
from scheduler_svc.requests import Delta, GenerationRequest
from scheduler_svc.settings import SchedulerSettings


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """See inference.proto. `ErrorBoundary` turns the exceptions raised here into statuses."""

    def __init__(self, engine: Engine, settings: SchedulerSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._closing: set[asyncio.Future[None]] = set()

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        deadline = Deadline.of(context, self._settings.max_request_s)
        generation = await self._accepted(request, deadline)
        held: defaultdict[int, list[Delta]] = defaultdict(list)
        unfinished = generation.num_samples
        deltas = self._engine.generate(generation)
        sending = False
        expiry: asyncio.TimerHandle | None = None

        def expire() -> None:
            # While a reader who has stopped is waited for, nobody can be told.
            if sending:
                self._close(deltas)
            else:
                self._engine.fail_request(generation.request_id, deadline.error())

        try:
            # Before the first tokens this waits for many things; then for the engine alone, and a timer is cheaper.
            delta = await deadline.bounded(anext(deltas, None))
            expiry = deadline.call(expire)
            while delta is not None:
                unfinished -= delta.finish is not None
                if not generation.streams:
                    held[delta.index].append(delta)
                if generation.streams or delta.finish is not None:
                    whole = delta if generation.streams else merge(held.pop(delta.index))
                    sending = True
                    yield to_response(generation.request_id, whole)
                    sending = False
                if unfinished:
                    # Answers that were closed meanwhile must not look like ones that have ended.
                    deadline.check()
                delta = await anext(deltas, None)
        finally:
            if expiry is not None:
                expiry.cancel()
            await deltas.aclose()

    def _close(self, deltas: AsyncGenerator[Delta, None]) -> None:
        closing = asyncio.ensure_future(_closed(deltas))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        deadline = Deadline.of(context, self._settings.max_request_s)
        model = self._engine.model(request.model)
        validation.check_tokenize(request, limits_of(model, self._settings), has_chat_template=model.has_chat_template)
        return inference_pb2.TokenizeResponse(token_ids=await deadline.bounded(_tokenized(request, model)))

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.DetokenizeResponse:
        deadline = Deadline.of(context, self._settings.max_request_s)
        model = self._engine.model(request.model)
        validation.check_detokenize(request, limits_of(model, self._settings))
        skip = request.skip_special_tokens or not request.HasField("skip_special_tokens")
        text = await deadline.bounded(model.detokenize(list(request.token_ids), skip))
        return inference_pb2.DetokenizeResponse(text=text)

    async def _accepted(self, request: inference_pb2.GenerateRequest, deadline: Deadline) -> GenerationRequest:
        model = self._engine.model(request.model)
        limits = limits_of(model, self._settings)
        validation.check_generate(request, limits, has_chat_template=model.has_chat_template)
        cuts = request.HasField("truncate_prompt_tokens")
        if request.WhichOneof("prompt") == "token_ids":
            ids = request.token_ids.ids
            prompt_ids = list(ids[-request.truncate_prompt_tokens :] if cuts else ids)
        else:
            prompt_ids = await deadline.bounded(_tokenized(request, model, bounded=not cuts))
            prompt_ids = prompt_ids[-request.truncate_prompt_tokens :] if cuts else prompt_ids
            validation.check_prompt_ids(request.WhichOneof("prompt"), prompt_ids, limits)
        validation.check_one_message(request, len(prompt_ids), limits)
        words = list(request.sampling.bad_words)
        spellings = await deadline.bounded(model.spellings(words)) if words else []
        deadline.check()
        defaults = model.sampling_defaults if self._settings.model_sampling else {}
        return generation_request(request, prompt_ids, limits, spellings, defaults)


def _tokenized(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, model: Model, *, bounded: bool = True
) -> Awaitable[list[int]]:
    if request.WhichOneof("prompt") == "chat":
        messages = [{"role": m.role, "content": m.content} for m in request.chat.messages]
        return model.tokenize_chat(messages, bounded=bounded)
    return model.tokenize(request.text, bounded=bounded)


async def _closed(deltas: AsyncGenerator[Delta, None]) -> None:
    # If somebody waits for the next delta again, that wait ends at the deadline by itself.
    with contextlib.suppress(RuntimeError):
        await deltas.aclose()
