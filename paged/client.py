"""An asyncio client of Paged, over grpcio and protobuf alone.

async with Client("127.0.0.1:50051") as client:
    async for message in client.generate("Once upon a time", max_tokens=32, temperature=0):
        print(message.text, end="")
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack

import grpc
import grpc.aio

from paged import options as checked
from paged.errors import (
    DeadlineExceededError,
    DuplicateRequestError,
    FieldViolation,
    InvalidRequestError,
    ModelNotFoundError,
    PagedClientError,
    RequestAbortedError,
    ResourceExhaustedError,
    ServerError,
    UnavailableError,
    client_error,
)
from paged.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

__all__ = [
    "Client",
    "Completion",
    "DeadlineExceededError",
    "DuplicateRequestError",
    "FieldViolation",
    "InvalidRequestError",
    "ModelNotFoundError",
    "Options",
    "PagedClientError",
    "Prompt",
    "RequestAbortedError",
    "ResourceExhaustedError",
    "ServerError",
    "UnavailableError",
    "chat",
    "generate_request",
]

OWN_FIELDS = (
    "request_id",
    "model",
    "logprobs",
    "prompt_logprobs",
    "echo",
    "truncate_prompt_tokens",
    "cache_salt",
    "n",
    "beam",
    "best_of",
    "priority",
    "tenant",
    "prefix_cache_bypass",
)

Prompt = str | Sequence[int] | inference_pb2.Chat
Response = TypeVar("Response")


class Options(TypedDict, total=False):
    """What may be said of a generation, named and documented as in inference.proto. What is left out stays unset."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    bad_token_sequences: Sequence[Sequence[int]]
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop_string: bool
    logprobs: int
    prompt_logprobs: int
    echo: bool
    truncate_prompt_tokens: int
    cache_salt: str
    prefix_cache_bypass: bool
    priority: int
    tenant: str
    n: int
    beam: inference_pb2.BeamSearch
    best_of: int
    json_schema: str | Mapping[str, Any]  # Of these four, one: fields of `Grammar`.
    regex: str
    choice: Sequence[str]
    lark: str
    model: str
    request_id: str
    timeout_s: float  # The call's deadline.


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    request_id: str
    text: str
    token_ids: list[int]
    finish: inference_pb2.Finish
    usage: inference_pb2.Usage
    logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)
    score: float | None = None  # with beam or best_of


class Client:
    """One connection to a scheduler. Every method raises `PagedClientError` where the call fails.

    `address` is HOST:PORT, or any target that gRPC knows (`dns:///scheduler:50051`, which spreads calls over all
    addresses of that name). `credentials` None means no encryption. `max_message_bytes` bounds a message in either
    direction; the server has a limit of its own (`--max-message-bytes`).
    """

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        credentials: grpc.ChannelCredentials | None = None,
        max_message_bytes: int = 64 * 1024 * 1024,
        channel_options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        options = [*_channel_options(max_message_bytes), *channel_options]
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=options)
        self._inference: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._control: Any = control_pb2_grpc.ControlServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection and every call on it."""
        await self._channel.close(None)

    async def generate(
        self, prompt: Prompt, **options: Unpack[Options]
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """The answer as it comes; the last message has `finish` and `usage`. Leaving the loop ends the request.

        With `n` samples their messages come mixed, told apart by `index`, and each sample has a last one.

        `prompt` is a text, token ids, or a `chat(...)`.
        """
        call = self._inference.Generate(generate_request(prompt, **options), timeout=options.get("timeout_s"))
        try:
            async for message in call:
                yield message
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            raise await _translated(call, error) from None
        finally:
            call.cancel()

    async def complete(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole answer, in one message. Raises TypeError with `n` above 1: that is for `complete_samples`."""
        if options.get("n") not in (None, 1):
            raise TypeError(f"n: is {options['n']}; complete gives one answer, complete_samples several")
        (whole,) = await self.complete_samples(prompt, **options)
        return whole

    async def complete_samples(self, prompt: Prompt, **options: Unpack[Options]) -> list[Completion]:
        """The whole answers of all `n` samples, by index; one message each."""
        request = generate_request(prompt, **options)
        request.stream = False
        call = self._inference.Generate(request, timeout=options.get("timeout_s"))
        try:
            messages = [message async for message in call]
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            raise await _translated(call, error) from None
        finally:
            call.cancel()
        return [
            Completion(
                request_id=whole.request_id,
                text=whole.text,
                token_ids=list(whole.token_ids),
                finish=whole.finish,
                usage=whole.usage,
                logprobs=list(whole.logprobs),
                prompt_token_ids=list(whole.prompt_token_ids),
                prompt_logprobs=list(whole.prompt_logprobs),
                score=whole.score if whole.HasField("score") else None,
            )
            for whole in sorted(messages, key=lambda message: message.index)
        ]

    async def tokenize(self, prompt: str | inference_pb2.Chat, *, model: str = "") -> list[int]:
        given = {"model": model, **checked.text_or_chat("prompt", prompt)}
        request = inference_pb2.TokenizeRequest(**_picked(given, inference_pb2.TokenizeRequest))
        return list((await self._answer(self._inference.Tokenize(request))).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, model: str = "") -> str:
        given = {
            "model": model,
            "token_ids": checked.token_ids("token_ids", token_ids),
            "skip_special_tokens": skip_special_tokens,
        }
        request = inference_pb2.DetokenizeRequest(**_picked(given, inference_pb2.DetokenizeRequest))
        return (await self._answer(self._inference.Detokenize(request))).text

    async def model(self, name: str = "") -> control_pb2.GetModelResponse:
        """Facts of the model of that name, or of the only one that is served."""
        request = control_pb2.GetModelRequest(**_picked({"model": name}, control_pb2.GetModelRequest))
        return await self._answer(self._control.GetModel(request))

    async def models(self) -> list[control_pb2.GetModelResponse]:
        """Facts of all models that are served, by name."""
        return list((await self._answer(self._control.ListModels(control_pb2.ListModelsRequest()))).models)

    async def load(self) -> control_pb2.GetLoadResponse:
        """How busy the scheduler and its blocks are, now."""
        return await self._answer(self._control.GetLoad(control_pb2.GetLoadRequest()))

    async def abort(self, request_ids: Sequence[str]) -> list[str]:
        """End these requests; returns those that were found."""
        request = control_pb2.AbortRequest(request_ids=checked.texts("request_ids", request_ids))
        return list((await self._answer(self._control.Abort(request))).request_ids)

    async def flush_prefix_cache(self) -> int:
        """Forget all cached prefixes; returns the number of their blocks."""
        return (await self._answer(self._control.FlushPrefixCache(control_pb2.FlushPrefixCacheRequest()))).blocks

    async def watch_prefix_cache(self) -> AsyncGenerator[control_pb2.WatchPrefixCacheResponse, None]:
        """Which prefixes are cached, and each change from then on; see control.proto. Ends when the loop is left."""
        call = self._control.WatchPrefixCache(control_pb2.WatchPrefixCacheRequest())
        try:
            async for message in call:
                yield message
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            raise await _translated(call, error) from None
        finally:
            call.cancel()

    async def _answer(self, call: Any) -> Any:
        try:
            return await call
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            raise await _translated(call, error) from None


def chat(*messages: tuple[str, str] | Mapping[str, str]) -> inference_pb2.Chat:
    """A conversation as a prompt, of (role, content) pairs or of dicts with these two keys. Raises TypeError
    or ValueError for a message that is neither."""
    return inference_pb2.Chat(messages=[checked.chat_message(i, message) for i, message in enumerate(messages)])


def generate_request(prompt: Prompt, **options: Unpack[Options]) -> inference_pb2.GenerateRequest:
    """The message that `Client.generate` sends. Raises TypeError for an unknown option, and TypeError or
    ValueError, naming the option, for a value that the message cannot hold. None is as if left out."""
    if unknown := options.keys() - Options.__annotations__.keys():
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    for name, convert in _CONVERTERS.items():
        if name in given:
            given[name] = convert(name, given[name])
    stop = inference_pb2.StopConditions(**_picked(given, inference_pb2.StopConditions))
    with checked.named("stop"):
        stop.strings.extend(given.get("stop", ()))
    with checked.named("stop_token_ids"):
        stop.token_ids.extend(given.get("stop_token_ids", ()))
    return inference_pb2.GenerateRequest(
        sampling=inference_pb2.SamplingParams(**_picked(given, inference_pb2.SamplingParams)),
        stop=stop,
        **_picked({name: given[name] for name in OWN_FIELDS if name in given}, inference_pb2.GenerateRequest),
        grammar=_grammar(given),
        **checked.prompt_field(prompt),
    )


_CONVERTERS: dict[str, Callable[[str, Any], Any]] = {
    "logit_bias": checked.logit_biases,
    "allowed_token_ids": checked.token_ids,
    "bad_words": checked.texts,
    "bad_token_sequences": checked.token_id_lists,
    "stop": checked.text_or_texts,
    "stop_token_ids": checked.token_ids,
    "json_schema": checked.schema,
    "choice": checked.choice,
    "timeout_s": checked.seconds,
}


def _grammar(given: Mapping[str, Any]) -> inference_pb2.Grammar | None:
    kinds = [name for name in inference_pb2.Grammar.DESCRIPTOR.fields_by_name if name in given]
    if len(kinds) > 1:
        raise TypeError(f"{' and '.join(kinds)}: a request has one grammar")
    return inference_pb2.Grammar(**_picked(given, inference_pb2.Grammar)) if kinds else None


def _picked(given: Mapping[str, Any], message: Any) -> dict[str, Any]:
    picked = {name: given[name] for name in message.DESCRIPTOR.fields_by_name if name in given}
    for name, value in picked.items():
        with checked.named(name):
            message(**{name: value})
    return picked


def _channel_options(max_message_bytes: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
    ]


async def _translated(call: Any, error: BaseException) -> BaseException:
    """Ours for gRPC's. A cancellation of the caller's own task stays what it is."""
    if isinstance(error, grpc.aio.AioRpcError):
        return client_error(error.code(), error.details(), error.trailing_metadata())
    task = asyncio.current_task()
    if (task is not None and task.cancelling()) or not call.done():
        return error
    # grpc.aio reports a server's CANCELLED as if this task had been cancelled.
    return client_error(await call.code(), await call.details(), await call.trailing_metadata())
