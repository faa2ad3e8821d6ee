"""VllmEngine, as ready-made gateways speak to vLLM: another way to say what our own services say."""

import hashlib
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NoReturn

import grpc.aio
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as vllm_grpc

from scheduler_svc.api.deadline import Deadline
from scheduler_svc.api.engine_face import Engine, Model
from scheduler_svc.api.generating import GeneratingServicer, Saying
from scheduler_svc.api.served import limits_of
from scheduler_svc.api.validation import LOGPROB_BYTES, TOKEN_BYTES
from scheduler_svc.api.vllm_kv_events import KvEventStream
from scheduler_svc.api.vllm_loads import LoadRecords, VllmLoads
from scheduler_svc.api.vllm_request import our_request
from scheduler_svc.api.vllm_responses import VllmAnswers
from scheduler_svc.errors import FieldViolation, InvalidRequest, PagedError, Unsupported
from scheduler_svc.requests import GenerationRequest
from scheduler_svc.settings import SchedulerSettings

TOKENIZER_CHUNK_BYTES = 64 * 1024
MAX_SEQUENCE_NUMBER = 1 << 62  # to begin with: those that follow fit the field, too
# The service knows one model only, and no path of it: files come by GetTokenizer.
NO_PATH = ""


class VllmEngineServicer(GeneratingServicer, vllm_grpc.VllmEngineServicer):
    """See vllm_engine.proto of smg-grpc-proto, and docs/gateway.md for what is done of it."""

    def __init__(self, engine: Engine, settings: SchedulerSettings) -> None:
        super().__init__(engine, settings)
        self._loads = VllmLoads(engine.load, self._block_size)
        self._started_at = time.monotonic()
        self._last_request_at = 0.0

    @property
    def _model(self) -> Model:
        return self._engine.model(self._settings.vllm_model)

    def _block_size(self) -> int:
        """0 while there is no model, and so no block."""
        try:
            return self._model.facts.block_size
        except PagedError:
            return 0

    async def _begin(self, request: vllm.GenerateRequest, deadline: Deadline) -> tuple[GenerationRequest, Saying]:
        self._last_request_at = time.time()
        generation = await self._accepted(our_request(request, self._settings.vllm_model), deadline)
        _check_prompt_logprobs(generation, self._settings.max_message_bytes)
        return generation, VllmAnswers(generation).say

    async def Abort(self, request: vllm.AbortRequest, context: grpc.aio.ServicerContext) -> vllm.AbortResponse:
        self._engine.abort(list(request.request_ids))
        return vllm.AbortResponse()

    async def HealthCheck(
        self, request: vllm.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> vllm.HealthCheckResponse:
        name = self._model.facts.name  # or refused: a gateway takes any answer for a worker's that says its model, once
        if not self._engine.ready:
            return vllm.HealthCheckResponse(healthy=False, message="no executor is attached, or shutting down")
        return vllm.HealthCheckResponse(healthy=True, message=f"serves {name}")

    async def GetModelInfo(
        self, request: vllm.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> vllm.GetModelInfoResponse:
        model = self._model
        facts, limits = model.facts, limits_of(model, self._settings)
        defaults = dict(model.sampling_defaults) if self._settings.model_sampling else {}
        return vllm.GetModelInfoResponse(
            model_path=facts.name,
            served_model_name=facts.name,
            tokenizer_path=NO_PATH,
            is_generation=True,
            max_context_length=limits.max_model_len,
            max_req_input_len=limits.max_model_len - 1,
            vocab_size=facts.vocab_size,
            model_type=model.model_type,
            architectures=[facts.architecture],
            eos_token_ids=facts.eos_token_ids,
            bos_token_id=facts.bos_token_id,
            default_sampling_params_json=json.dumps(defaults) if defaults else "",
        )

    async def GetServerInfo(
        self, request: vllm.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> vllm.GetServerInfoResponse:
        facts, load = self._model.facts, self._engine.load()
        return vllm.GetServerInfoResponse(
            active_requests=load.running_sequences + load.waiting_sequences,
            last_receive_timestamp=self._last_request_at,
            uptime_seconds=time.monotonic() - self._started_at,
            server_type="vllm-grpc",
            data_parallel_size=1,
            block_size=facts.block_size,
            model_dtype=facts.dtype,
            max_num_seqs=load.total_rows,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(self, request: vllm.GetLoadsRequest, context: grpc.aio.ServicerContext) -> vllm.GetLoadsResponse:
        if request.dp_rank:
            raise InvalidRequest(FieldViolation("dp_rank", f"is {request.dp_rank}; there is rank 0 alone"))
        return self._loads.response()

    async def GetTokenizer(
        self, request: common.GetTokenizerRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[common.GetTokenizerChunk, None]:
        data = await self._model.tokenizer_bundle()
        for begin in range(0, len(data), TOKENIZER_CHUNK_BYTES):
            end = begin + TOKENIZER_CHUNK_BYTES
            digest = "" if end < len(data) else hashlib.sha256(data).hexdigest()
            yield common.GetTokenizerChunk(data=data[begin:end], sha256=digest)

    async def SubscribeKvEvents(
        self, request: common.SubscribeKvEventsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[common.KvEventBatch, None]:
        first = request.start_sequence_number
        if first > MAX_SEQUENCE_NUMBER:
            raise InvalidRequest(FieldViolation("start_sequence_number", f"is {first}; at most {MAX_SEQUENCE_NUMBER}"))
        await context.send_initial_metadata(())  # the caller waits for it, and there may be nothing to tell for long
        changes = self._engine.watch_cached_blocks()
        stream = KvEventStream(
            LoadRecords(self._loads.now),
            first,
            self._engine.num_unknown_blocks,
            load_comes_first=request.load_records_before_first_batch,
        )
        async with aclosing(stream.messages(changes)) as messages:
            async for message in messages:
                yield message

    async def FlushCache(
        self, request: common.FlushCacheRequest, context: grpc.aio.ServicerContext
    ) -> common.FlushCacheResponse:
        num_blocks = self._engine.flush_prefix_cache()
        return common.FlushCacheResponse(success=True, message=f"{num_blocks} blocks were forgotten")

    async def Embed(self, request: vllm.EmbedRequest, context: grpc.aio.ServicerContext) -> NoReturn:
        raise Unsupported("models that generate are served here; there are no embeddings")

    async def StartProfile(self, request: common.StartProfileRequest, context: grpc.aio.ServicerContext) -> NoReturn:
        raise Unsupported("there is no profiler to start; see the metrics of both services")

    async def StopProfile(self, request: common.StopProfileRequest, context: grpc.aio.ServicerContext) -> NoReturn:
        raise Unsupported("there is no profiler to stop; see the metrics of both services")


def _check_prompt_logprobs(generation: GenerationRequest, max_message_bytes: int) -> None:
    """Raises InvalidRequest where the first message, which tells all of them, would be too large."""
    if generation.sampling.prompt_logprobs is None:
        return
    num_bytes = len(generation.prompt_ids) * (TOKEN_BYTES + LOGPROB_BYTES * (generation.sampling.prompt_logprobs + 1))
    if num_bytes > max_message_bytes:
        found = f"can take {num_bytes} bytes for {len(generation.prompt_ids)} tokens"
        limit = f"a message has {max_message_bytes} at most: ask for fewer"
        raise InvalidRequest(FieldViolation("sampling_params.prompt_logprobs", f"{found}, and {limit}"))
