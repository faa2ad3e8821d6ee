"""The client for programs without an event loop: the same calls, which wait.

with BlockingClient("127.0.0.1:50051") as client:
    for message in client.generate("Once upon a time", max_tokens=32, temperature=0):
        print(message.text, end="")
"""

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack

import grpc

from paged.client import Client, Completion
from paged.requests import Options, Prompt
from paged.retries import Retries
from paged.v1 import control_pb2, inference_pb2

T = TypeVar("T")


class ClientOptions(TypedDict, total=False):
    """As `paged.client.Client` takes and explains them."""

    credentials: grpc.ChannelCredentials | None
    authority: str | None
    token: str | None
    token_file: str | None
    insecure: bool
    max_message_bytes: int
    retries: Retries
    share_calls: bool
    channel_options: Sequence[tuple[str, Any]]


class BlockingClient:
    """`paged.client.Client` on an event loop in a thread of its own: the same methods, arguments and errors.

    Threads may share one. A Ctrl-C while a call waits ends the call. Close it, or use it as a context manager: its
    connection and its thread last until then.
    """

    def __init__(self, address: str = "127.0.0.1:50051", **options: Unpack[ClientOptions]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="paged-client", daemon=True)
        self._thread.start()
        try:
            self._client: Client = self._result(self._made(address, options))
        except BaseException:
            self._end_loop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection and every call on it. Once more does nothing."""
        if self._loop.is_closed():
            return
        self._result(self._all_ended())
        self._end_loop()

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[inference_pb2.GenerateResponse]:
        """The answer as it comes. The request ends where the iterator is closed, or let go."""
        return self._iterated(lambda: self._client.generate(prompt, **options))

    def complete(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        return self._result(self._client.complete(prompt, **options))

    def complete_samples(self, prompt: Prompt, **options: Unpack[Options]) -> list[Completion]:
        return self._result(self._client.complete_samples(prompt, **options))

    def tokenize(self, prompt: str | inference_pb2.Chat, *, model: str = "") -> list[int]:
        return self._result(self._client.tokenize(prompt, model=model))

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, model: str = "") -> str:
        return self._result(self._client.detokenize(token_ids, skip_special_tokens=skip_special_tokens, model=model))

    def model(self, name: str = "") -> control_pb2.GetModelResponse:
        return self._result(self._client.model(name))

    def models(self) -> list[control_pb2.GetModelResponse]:
        return self._result(self._client.models())

    def load(self) -> control_pb2.GetLoadResponse:
        return self._result(self._client.load())

    def abort(self, request_ids: Sequence[str]) -> list[str]:
        return self._result(self._client.abort(request_ids))

    def flush_prefix_cache(self) -> int:
        return self._result(self._client.flush_prefix_cache())

    def watch_prefix_cache(self) -> Iterator[control_pb2.WatchPrefixCacheResponse]:
        """Ends where the iterator is closed, or let go; so does `watch`."""
        return self._iterated(self._client.watch_prefix_cache)

    def watch(
        self, *, period_ms: int | None = None, max_requests: int | None = None
    ) -> Iterator[control_pb2.WatchResponse]:
        return self._iterated(lambda: self._client.watch(period_ms=period_ms, max_requests=max_requests))

    def block_tables(self, request_id: str) -> control_pb2.GetBlockTablesResponse:
        return self._result(self._client.block_tables(request_id))

    def prefix_tree(self, executor: str = "", *, max_blocks: int | None = None) -> control_pb2.GetPrefixTreeResponse:
        return self._result(self._client.prefix_tree(executor, max_blocks=max_blocks))

    @staticmethod
    async def _made(address: str, options: ClientOptions) -> Client:
        return Client(address, **options)

    async def _all_ended(self) -> None:
        await self._client.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}  # calls of other threads
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_asyncgens()

    def _iterated(self, begin: Callable[[], AsyncGenerator[T, None]]) -> Iterator[T]:
        messages = begin()
        try:
            while (message := self._result(anext(messages, None))) is not None:
                yield message
        finally:
            self._let_go(messages)

    def _let_go(self, messages: AsyncGenerator[Any, None]) -> None:
        if self._loop.is_closed():
            return
        closed = asyncio.run_coroutine_threadsafe(_closed(messages), self._loop)
        # The garbage collector may let an iterator go in any thread, that of the loop among them.
        if threading.current_thread() is not self._thread:
            closed.result()

    def _result(self, work: Awaitable[T]) -> T:
        if self._loop.is_closed():
            if asyncio.iscoroutine(work):
                work.close()
            raise RuntimeError("the client is closed")
        future: Future[T] = asyncio.run_coroutine_threadsafe(_awaited(work), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # nothing, where it has ended
            raise

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _awaited(work: Awaitable[T]) -> T:
    return await work


async def _closed(messages: AsyncGenerator[Any, None]) -> None:
    while getattr(messages, "ag_running", False):  # whoever waited for it has been cancelled just now
        await asyncio.sleep(0)
    await messages.aclose()
