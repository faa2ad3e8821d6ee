"""An engine that answers what a test has written down, and remembers what it was asked."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

from paged.v1 import control_pb2, executor_pb2
from scheduler_svc.block_watch import BlockChanges
from scheduler_svc.core.cache_events import Told
from scheduler_svc.core.sequence import TokenLogprobs
from scheduler_svc.core.tenants import Tenants
from scheduler_svc.errors import FieldViolation, InvalidRequest, NotThere, PagedError
from scheduler_svc.requests import Delta, Finish, GenerationRequest, Usage

VOCAB_SIZE = 512
MAX_MODEL_LEN = 64

Action = Delta | Exception | Callable[[], Awaitable[object]]

ANSWER = [
    Delta("On", [11], [TokenLogprobs(-0.5, 1, [11, 12], [-0.5, -1.5])]),
    Delta("", [12], [TokenLogprobs(-2.0, 7, [3, 4], [-0.1, -3.0])]),
    Delta("ce", [13, 14], [TokenLogprobs(-0.25, 1, [13], [-0.25]), TokenLogprobs(-1.0, 2, [9], [-0.75])]),
    Delta("!", [2], [TokenLogprobs(-0.125, 1, [2], [-0.125])], Finish(token_id=2), Usage(5, 5, 4)),
]


def scripted_facts() -> executor_pb2.ModelFacts:
    return executor_pb2.ModelFacts(
        name="scripted",
        architecture="ScriptedForCausalLM",
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=[2],
        bos_token_id=1,
        dtype="float32",
        fingerprint="f00d",
        block_size=16,
    )


@dataclass
class ScriptedEngine:
    """An engine and its only model. Plays `script` for every request: deltas are sent, exceptions raised, callables
    awaited.

    One token a character of a text; the empty text gives none.
    """

    script: list[Action] = field(default_factory=lambda: list(ANSWER))
    facts: executor_pb2.ModelFacts = field(default_factory=scripted_facts)
    model_error: Exception | None = None
    room_error: Exception | None = None
    ready: bool = True
    tenants: Tenants = field(default_factory=Tenants)
    has_chat_template: bool = True
    tokenize_error: Exception | None = None
    submitted: list[GenerationRequest] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    told: list[tuple[str, Told]] = field(default_factory=list)
    changes: list[BlockChanges] = field(default_factory=list)
    num_unknown_blocks: int = 0
    model_type: str = "scripted"
    bundle: bytes = b""
    failed: dict[str, asyncio.Future[None]] = field(default_factory=dict)  # each live request's error, once it has one
    ended: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    def model(self, name: str) -> "ScriptedEngine":
        if self.model_error is not None:
            raise self.model_error
        return self

    @property
    def models(self) -> "list[ScriptedEngine]":
        return [self]

    @property
    def sampling_defaults(self) -> dict[str, float]:
        return {"temperature": 0.5, "top_k": 7.0}

    def check_text_bytes(self, num_bytes: int) -> None:
        if num_bytes >= 4 * self.facts.max_model_len:
            raise InvalidRequest(FieldViolation("text", f"has {num_bytes} bytes"))

    async def tokenize(self, text: str, *, bounded: bool = True) -> list[int]:
        if self.tokenize_error is not None:
            raise self.tokenize_error
        return [ord(character) % VOCAB_SIZE for character in text]

    async def spellings(self, words: list[str]) -> list[list[list[int]]]:
        return [[await self.tokenize(text) for text in (word, " " + word)] for word in words]

    async def tokenize_chat(self, messages: list[dict[str, str]], *, bounded: bool = True) -> list[int]:
        return await self.tokenize("".join(f"<{m['role']}>{m['content']}" for m in messages))

    async def detokenize(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(i) for i in ids if not (skip_special_tokens and i < 32))

    def check_room(self, tenant: str) -> None:
        if self.room_error is not None:
            raise self.room_error

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        self.submitted.append(request)
        self.live.add(request.request_id)
        failed = self.failed[request.request_id] = asyncio.get_running_loop().create_future()
        try:
            for action in self.script:
                if isinstance(action, Exception):
                    raise action
                if isinstance(action, Delta):
                    yield action
                else:
                    await self._until_failed(action(), failed)
        finally:
            self.live.discard(request.request_id)
            self.ended.put_nowait(request.request_id)

    async def _until_failed(self, work: Awaitable[object], failed: asyncio.Future[None]) -> None:
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait([working, failed], return_when=asyncio.FIRST_COMPLETED)
            (failed if failed.done() else working).result()
        finally:
            working.cancel()

    def fail_request(self, request_id: str, error: PagedError) -> None:
        if request_id in self.live:
            self.failed[request_id].set_exception(error)

    def abort(self, request_ids: list[str]) -> list[str]:
        found = [request_id for request_id in request_ids if request_id in self.live]
        self.aborted += found
        return found

    def flush_prefix_cache(self) -> int:
        return 7

    async def watch_prefix_cache(self) -> AsyncGenerator[tuple[str, Told], None]:
        for told in self.told:
            yield told

    async def watch_cached_blocks(self) -> AsyncGenerator[BlockChanges, None]:
        for changes in self.changes:
            yield changes
        await forever()

    async def tokenizer_bundle(self) -> bytes:
        return self.bundle

    @property
    def watch(self) -> "ScriptedWatch":
        return ScriptedWatch()

    def load(self) -> control_pb2.GetLoadResponse:
        return control_pb2.GetLoadResponse(running_sequences=len(self.live), executor_attached=self.ready)


class ScriptedWatch:
    """Tells of a scheduler that has nothing to do."""

    async def messages(
        self, period_s: float, max_requests: int, tenant: str | None
    ) -> AsyncGenerator[control_pb2.WatchResponse, None]:
        message = control_pb2.WatchResponse(load=control_pb2.GetLoadResponse())
        while True:
            yield message
            message.rates.period_ms = round(period_s * 1000)
            await asyncio.sleep(period_s)

    def block_tables(self, request_id: str, tenant: str | None) -> control_pb2.GetBlockTablesResponse:
        raise NotThere(f"request_id: no live request is called {request_id!r}")

    async def prefix_tree(self, executor: str, max_blocks: int) -> control_pb2.GetPrefixTreeResponse:
        return control_pb2.GetPrefixTreeResponse(executor=executor)


async def forever() -> None:
    """A step that never ends by itself."""
    await asyncio.Event().wait()
