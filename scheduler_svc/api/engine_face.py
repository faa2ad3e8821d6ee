"""What the servicers need of the engine."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from paged.v1 import control_pb2, executor_pb2
from scheduler_svc.core.cache_events import Told
from scheduler_svc.errors import PagedError
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

    async def tokenize(self, text: str, *, bounded: bool = True) -> list[int]:
        """Ids of a text, begin token included where the model's tokenizer adds one. If `bounded`, what is certain
        to be longer than the model is refused before the work."""

    async def tokenize_chat(self, messages: list[dict[str, str]], *, bounded: bool = True) -> list[int]:
        """The same of a conversation in the model's own template, of dicts with `role` and `content`."""

    async def detokenize(self, ids: list[int], skip_special_tokens: bool) -> str: ...

    async def spellings(self, words: list[str]) -> list[list[list[int]]]:
        """Of each word the ids that spell it, alone and behind a space."""


class Engine(Protocol):
    """Turns requests into answers; see `scheduler_svc.engine`. Errors are those of `scheduler_svc.errors`."""

    def model(self, name: str) -> Model:
        """The model of that name, or the only one if it is empty. Raises ModelNotFound, InvalidRequest where the empty
        name could mean several, and Unavailable until an executor was attached once."""

    @property
    def models(self) -> Sequence[Model]:
        """All of them, by name."""

    @property
    def ready(self) -> bool:
        """An executor is attached, and the scheduler is not shutting down."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """The answer as it comes; the last delta has `finish` and `usage`. Closing or cancelling it frees all."""

    def fail_request(self, request_id: str, error: PagedError) -> None:
        """End this request with the error, if it is live."""

    def abort(self, request_ids: list[str]) -> list[str]:
        """End these requests with `RequestAborted`; returns those that were found."""

    def flush_prefix_cache(self) -> int:
        """Forget all cached prefixes; returns the number of their blocks."""

    def watch_prefix_cache(self) -> AsyncGenerator[tuple[str, Told], None]:
        """What is cached, then each change, each with its executor's endpoint; raises TooManyWatchers."""

    def load(self) -> control_pb2.GetLoadResponse: ...
