"""What the servicers need of the engine."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from paged.v1 import control_pb2, executor_pb2
from scheduler_svc.block_watch import BlockChanges
from scheduler_svc.core.cache_events import Told
from scheduler_svc.core.tenants import Tenants
from scheduler_svc.errors import PagedError
from scheduler_svc.gathering import GatheredReader, Gathering
from scheduler_svc.requests import Delta, GenerationRequest


class Model(Protocol):
    """One that is served; see `scheduler_svc.served_model`."""

    @property
    def facts(self) -> executor_pb2.ModelFacts: ...

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """What the model's own configuration says of sampling parameters, by name."""

    def check_text_bytes(self, num_bytes: int) -> None:
        """Raises InvalidRequest where a text of so many bytes of UTF-8 is certain to be longer than the model."""

    async def tokenize(self, text: str, *, bounded: bool = True) -> list[int]:
        """Ids of a text, begin token included where the model's tokenizer adds one. If `bounded`, what is certain
        to be longer than the model is refused before the work."""

    async def tokenize_chat(self, messages: list[dict[str, str]], *, bounded: bool = True) -> list[int]:
        """The same of a conversation in the model's own template, of dicts with `role` and `content`."""

    async def detokenize(self, ids: list[int], skip_special_tokens: bool) -> str: ...

    @property
    def model_type(self) -> str:
        """Of its configuration, as transformers calls it; may be empty."""

    async def tokenizer_bundle(self) -> bytes:
        """A zip of the tokenizer's files and the model's configurations. Raises Unavailable if it is not at hand."""

    async def spellings(self, words: list[str]) -> list[list[list[int]]]:
        """Of each word the ids that spell it, alone and behind a space."""


class Watch(Protocol):
    """What people who look on are told; see `scheduler_svc.watch`. `tenant` None means the requests of all."""

    def messages(
        self, period_s: float, max_requests: int, tenant: str | None
    ) -> AsyncGenerator[control_pb2.WatchResponse, None]:
        """The present state, and again after each period; raises TooManyWatchers."""

    def block_tables(self, request_id: str, tenant: str | None) -> control_pb2.GetBlockTablesResponse:
        """Of a live request; raises NotThere."""

    async def prefix_tree(self, executor: str, max_blocks: int) -> control_pb2.GetPrefixTreeResponse:
        """Of the executor at that endpoint, or of the only one; raises NotThere."""


class Engine(Protocol):
    """Turns requests into answers; see `scheduler_svc.engine`. Errors are those of `scheduler_svc.errors`."""

    def model(self, name: str) -> Model:
        """The model of that name, or the only one if it is empty. Raises ModelNotFound, InvalidRequest where the empty
        name could mean several, and Unavailable until an executor was attached once."""

    @property
    def models(self) -> Sequence[Model]:
        """All of them, by name."""

    @property
    def tenants(self) -> Tenants:
        """What each may have."""

    @property
    def ready(self) -> bool:
        """An executor is attached, and the scheduler is not shutting down."""

    def check_room(self, tenant: str) -> None:
        """Raises QueueFull or Unavailable where a request of the tenant would be refused whatever it is."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """The answer as it comes; the last delta has `finish` and `usage`. Closing or cancelling it frees all."""

    def gathering(self) -> Gathering:
        """Somebody who takes the answers to many requests together."""

    async def gathered(self, request: GenerationRequest, gathering: Gathering) -> GatheredReader:
        """The request's place in the gathering, through which its answers come until `leave`, which must follow. Ends
        at the request's `expires_at` by itself."""

    def leave(self, reader: GatheredReader) -> None:
        """All of the reader's request is freed."""

    def fail_request(self, request_id: str, error: PagedError) -> None:
        """End this request with the error, if it is live."""

    def abort(self, request_ids: list[str]) -> list[str]:
        """End these requests with `RequestAborted`; returns those that were found."""

    def flush_prefix_cache(self) -> int:
        """Forget all cached prefixes; returns the number of their blocks."""

    def watch_prefix_cache(self) -> AsyncGenerator[tuple[str, Told], None]:
        """What is cached, then each change, each with its executor's endpoint; raises TooManyWatchers."""

    def watch_cached_blocks(self) -> AsyncGenerator[BlockChanges, None]:
        """The blocks that are cached anywhere, with what they hold, then each change; raises TooManyWatchers."""

    @property
    def num_unknown_blocks(self) -> int:
        """Blocks that were cached before anybody watched them, and are not told of."""

    @property
    def watch(self) -> Watch: ...

    def load(self) -> control_pb2.GetLoadResponse: ...
