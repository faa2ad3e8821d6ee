"""An asyncio client of Paged, over grpcio and protobuf alone.

async with Client("127.0.0.1:50051") as client:
    async for message in client.generate("Once upon a time", max_tokens=32, temperature=0):
        print(message.text, end="")
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from paged import options as checked
from paged.channel import open_channel
from paged.credentials import Token, tls_credentials
from paged.errors import (
    DeadlineExceededError,
    DuplicateRequestError,
    FieldViolation,
    InvalidRequestError,
    ModelNotFoundError,
    NotFoundError,
    PagedClientError,
    PermissionDeniedError,
    RequestAbortedError,
    ResourceExhaustedError,
    ServerError,
    UnauthenticatedError,
    UnavailableError,
    translated,
)
from paged.many import Many, NotTaken
from paged.requests import Options, Prompt, chat, generate_request, picked
from paged.retries import DEFAULT_RETRIES, Attempts, Retries
from paged.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc

__all__ = [
    "Client",
    "Completion",
    "DeadlineExceededError",
    "DuplicateRequestError",
    "FieldViolation",
    "InvalidRequestError",
    "ModelNotFoundError",
    "NotFoundError",
    "Options",
    "PagedClientError",
    "PermissionDeniedError",
    "Prompt",
    "RequestAbortedError",
    "ResourceExhaustedError",
    "Retries",
    "ServerError",
    "UnauthenticatedError",
    "UnavailableError",
    "chat",
    "generate_request",
    "tls_credentials",
]


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
    """Calls to one scheduler, or to several in turn. Every method raises `PagedClientError` where the call fails.

    `address` is HOST:PORT, or any target that gRPC knows. A name stands for all its addresses
    (`dns:///scheduler:50051`), and so does a list (`ipv4:10.0.0.1:50051,10.0.0.2:50051`): calls go to them in turn, but
    to none that is away or about to stop; new addresses of the name are found when a connection ends. A request is
    tried again as `retries` says, as long as nothing of its answer has come. Methods of the control service are not,
    and are about the scheduler whose turn it is: give the address of one where that matters.

    `credentials` None means no encryption; `tls_credentials` makes some from files. The certificate must be of
    the host in `address`, or of `authority` where that is given, as it has to be for a list. A `token`, or a
    `token_file` (read again when it changes), goes with each call; without encryption it does not leave the machine,
    unless `insecure` says so. `max_message_bytes` bounds a message in either direction; the server has a
    limit of its own (`--max-message-bytes`). `channel_options` go before our own.

    With `share_calls` answers that stream have a few calls together (GenerateMany) instead of one each: with dozens of
    them at once that costs client and scheduler a fraction. Errors, deadlines and retries are the same; but what
    interceptors add to a call, such as the context of a trace, is then not each answer's own.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        credentials: grpc.ChannelCredentials | None = None,
        authority: str | None = None,
        token: str | None = None,
        token_file: Path | str | None = None,
        insecure: bool = False,
        max_message_bytes: int = 64 * 1024 * 1024,
        retries: Retries = DEFAULT_RETRIES,
        share_calls: bool = False,
        channel_options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self._retries = retries
        self._token = Token(token, token_file)
        self._channel = open_channel(
            address,
            credentials=credentials,
            authority=authority,
            with_token=bool(self._token),
            insecure=insecure,
            max_message_bytes=max_message_bytes,
            given=channel_options,
        )
        self._inference: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._many = Many(self._inference.GenerateMany, self._channel, address) if share_calls else None
        self._is_closed = False
        self._control: Any = control_pb2_grpc.ControlServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection and every call on it; later ones raise RuntimeError."""
        self._is_closed = True
        if self._many is not None:
            await self._many.close()
        await self._channel.close(None)

    async def generate(
        self, prompt: Prompt, **options: Unpack[Options]
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """The answer as it comes; the last message has `finish` and `usage`. Leaving the loop ends the request.

        With `n` samples their messages come mixed, told apart by `index`, and each sample has a last one.

        `prompt` is a text, token ids, or a `chat(...)`.
        """
        request = generate_request(prompt, **options)
        async with aclosing(self._messages(request, options.get("timeout_s"))) as messages:
            async for message in messages:
                yield message

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
        messages = [message async for message in self._messages(request, options.get("timeout_s"))]
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
        request = inference_pb2.TokenizeRequest(**picked(given, inference_pb2.TokenizeRequest))
        return list((await self._retried(self._inference.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, model: str = "") -> str:
        given = {
            "model": model,
            "token_ids": checked.token_ids("token_ids", token_ids),
            "skip_special_tokens": skip_special_tokens,
        }
        request = inference_pb2.DetokenizeRequest(**picked(given, inference_pb2.DetokenizeRequest))
        return (await self._retried(self._inference.Detokenize, request)).text

    async def model(self, name: str = "") -> control_pb2.GetModelResponse:
        """Facts of the model of that name, or of the only one that is served."""
        request = control_pb2.GetModelRequest(**picked({"model": name}, control_pb2.GetModelRequest))
        return await self._answer(self._control.GetModel, request)

    async def models(self) -> list[control_pb2.GetModelResponse]:
        """Facts of all models that are served, by name."""
        return list((await self._answer(self._control.ListModels, control_pb2.ListModelsRequest())).models)

    async def load(self) -> control_pb2.GetLoadResponse:
        """How busy the scheduler and its blocks are, now."""
        return await self._answer(self._control.GetLoad, control_pb2.GetLoadRequest())

    async def abort(self, request_ids: Sequence[str]) -> list[str]:
        """End these requests; returns those that were found."""
        request = control_pb2.AbortRequest(request_ids=checked.texts("request_ids", request_ids))
        return list((await self._answer(self._control.Abort, request)).request_ids)

    async def flush_prefix_cache(self) -> int:
        """Forget all cached prefixes; returns the number of their blocks."""
        return (await self._answer(self._control.FlushPrefixCache, control_pb2.FlushPrefixCacheRequest())).blocks

    async def watch_prefix_cache(self) -> AsyncGenerator[control_pb2.WatchPrefixCacheResponse, None]:
        """Which prefixes are cached, and each change from then on; see control.proto. Ends when the loop is left."""
        request = control_pb2.WatchPrefixCacheRequest()
        async with aclosing(self._stream(self._control.WatchPrefixCache, request)) as messages:
            async for message in messages:
                yield message

    async def watch(
        self, *, period_ms: int | None = None, max_requests: int | None = None
    ) -> AsyncGenerator[control_pb2.WatchResponse, None]:
        """What happens, now and again after each period; see control.proto, and `paged.watched.BlockStates` for the
        blocks. Ends when the loop is left."""
        given = {"period_ms": period_ms, "max_requests": max_requests}
        request = control_pb2.WatchRequest(**picked(given, control_pb2.WatchRequest))
        async with aclosing(self._stream(self._control.Watch, request)) as messages:
            async for message in messages:
                yield message

    async def block_tables(self, request_id: str) -> control_pb2.GetBlockTablesResponse:
        """Those of a live request. Raises NotFoundError."""
        given = {"request_id": request_id}
        request = control_pb2.GetBlockTablesRequest(**picked(given, control_pb2.GetBlockTablesRequest))
        return await self._answer(self._control.GetBlockTables, request)

    async def prefix_tree(
        self, executor: str = "", *, max_blocks: int | None = None
    ) -> control_pb2.GetPrefixTreeResponse:
        """The prefix cache of the executor at that endpoint, or of the only one. Raises NotFoundError."""
        given = {"executor": executor, "max_blocks": max_blocks}
        request = control_pb2.GetPrefixTreeRequest(**picked(given, control_pb2.GetPrefixTreeRequest))
        return await self._answer(self._control.GetPrefixTree, request)

    async def _messages(
        self, request: inference_pb2.GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Those of the first attempt that gets any, or ends well."""
        attempts = Attempts(self._retries, timeout_s)
        many = None if request.HasField("stream") and not request.stream else self._many
        while True:
            has_begun, num_ended = False, 0
            if many is None:
                answer = self._stream(self._inference.Generate, request, attempts.left_s)
            else:
                answer = self._shared(many, request, attempts.left_s)
            try:
                async with aclosing(answer) as messages:
                    async for message in messages:
                        has_begun = True
                        num_ended += message.HasField("finish")
                        yield message
                return
            except NotTaken:
                many = None
                continue
            except PagedClientError as error:
                if num_ended == max(request.n, 1):
                    return  # the answer is whole: only the call's status has not come
                pause_s = None if has_begun else attempts.pause_s(error)
                if pause_s is None:
                    raise
            await asyncio.sleep(pause_s)

    async def _shared(
        self, many: Many, request: inference_pb2.GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """In a call with others. Raises NotTaken."""
        self._check_open()
        await many.settled(self._token.metadata)
        self._check_open()  # it may have been closed meanwhile
        generation = many.begin(request, timeout_s, self._token.metadata)
        try:
            async for message in generation:
                yield message
        finally:
            generation.close()

    async def _stream(
        self, method: Callable[..., Any], request: Any, timeout_s: float | None = None
    ) -> AsyncGenerator[Any, None]:
        self._check_open()
        call = method(request, timeout=timeout_s, metadata=self._token.metadata)
        try:
            async for message in call:
                yield message
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            raise await translated(call, error) from None
        finally:
            call.cancel()

    async def _retried(self, method: Callable[..., Any], request: Any) -> Any:
        attempts = Attempts(self._retries, None)
        while True:
            try:
                return await self._answer(method, request)
            except PagedClientError as error:
                pause_s = attempts.pause_s(error)
                if pause_s is None:
                    raise
            await asyncio.sleep(pause_s)

    async def _answer(self, method: Callable[..., Any], request: Any) -> Any:
        self._check_open()
        call = method(request, metadata=self._token.metadata)
        try:
            return await call
        except (grpc.aio.AioRpcError, asyncio.CancelledError) as error:
            raise await translated(call, error) from None

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the client is closed")
