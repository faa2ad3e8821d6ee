"""What all services that generate have in common: from an accepted request to the last message of its call."""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import grpc.aio
import numpy as np

from paged.v1 import executor_pb2, inference_pb2
from scheduler_svc.api import validation
from scheduler_svc.api.accepted import generation_request
from scheduler_svc.api.caller import CALLER
from scheduler_svc.api.deadline import Deadline
from scheduler_svc.api.engine_face import Engine, Model
from scheduler_svc.api.responses import merge
from scheduler_svc.api.served import limits_of
from scheduler_svc.api.validation import Limits
from scheduler_svc.core.token_ids import TOKEN_IDS
from scheduler_svc.requests import Delta, GenerationRequest
from scheduler_svc.settings import SchedulerSettings

# The messages that say what a delta says, in the words of one API.
Saying = Callable[[Delta], Sequence[Any]]


class GeneratingServicer(ABC):
    """Its `Generate` is for any API whose requests can be said in ours."""

    def __init__(self, engine: Engine, settings: SchedulerSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._closing: set[asyncio.Future[None]] = set()
        self._known_limits: tuple[executor_pb2.ModelFacts, Limits] | None = None

    @abstractmethod
    async def _begin(self, request: Any, deadline: Deadline) -> tuple[GenerationRequest, Saying]:
        """What the engine is asked for, and how its answers are said. Of a request that does not stream, each answer is
        one delta."""

    async def Generate(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
        deadline = Deadline.of(context, self._settings.max_request_s)
        generation, saying = await self._begin(request, deadline)
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
                    for message in saying(whole):
                        yield message
                    sending = False
                if unfinished:
                    # Answers that were closed meanwhile must not look like ones that have ended.
                    deadline.check()
                delta = await anext(deltas, None)
        finally:
            if expiry is not None:
                expiry.cancel()
            await deltas.aclose()

    def _limits_of(self, model: Model) -> Limits:
        """Made anew only where the model's facts are others than those of the request before."""
        facts = model.facts
        if self._known_limits is None or self._known_limits[0] is not facts:
            self._known_limits = facts, limits_of(model, self._settings)
        return self._known_limits[1]

    def _close(self, deltas: AsyncGenerator[Delta, None]) -> None:
        closing = asyncio.ensure_future(_closed(deltas))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _accepted(self, request: inference_pb2.GenerateRequest, deadline: Deadline) -> GenerationRequest:
        """Raises what keeps it from being served."""
        request.tenant = CALLER.get().tenant_of(request.tenant)
        model = self._engine.model(request.model)
        self._engine.check_room(request.tenant)  # before any work for what would be refused
        limits = self._limits_of(model)
        validation.check_generate(request, limits, has_chat_template=model.has_chat_template)
        cuts = request.HasField("truncate_prompt_tokens")
        if request.WhichOneof("prompt") == "token_ids":
            ids = request.token_ids.ids
            prompt_ids = list(ids[-request.truncate_prompt_tokens :] if cuts else ids)
        else:
            prompt_ids = await deadline.bounded(tokenized(request, model, bounded=not cuts))
            prompt_ids = prompt_ids[-request.truncate_prompt_tokens :] if cuts else prompt_ids
            validation.check_prompt_ids(request.WhichOneof("prompt"), prompt_ids, limits)
        validation.check_one_message(request, len(prompt_ids), limits)
        words = list(request.sampling.bad_words)
        spellings = await deadline.bounded(model.spellings(words)) if words else []
        deadline.check()
        prompt_ids = TOKEN_IDS.of(np.array(prompt_ids, np.int64))  # they are kept as long as the request is
        defaults = model.sampling_defaults if self._settings.model_sampling else {}
        return generation_request(request, prompt_ids, limits, spellings, defaults, deadline.at)


def tokenized(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, model: Model, *, bounded: bool = True
) -> Awaitable[list[int]]:
    """The ids of a request's text or chat."""
    if request.WhichOneof("prompt") == "chat":
        messages = [{"role": m.role, "content": m.content} for m in request.chat.messages]
        return model.tokenize_chat(messages, bounded=bounded)
    return model.tokenize(request.text, bounded=bounded)


async def _closed(deltas: AsyncGenerator[Delta, None]) -> None:
    # If somebody waits for the next delta again, that wait ends at the deadline by itself.
    with contextlib.suppress(RuntimeError):
        await deltas.aclose()
