"""The tokenizer of the model that is served: fetched from the executor once, used from worker threads."""

import asyncio
from pathlib import Path

import structlog

from scheduler_svc.errors import FieldViolation, InvalidRequest, Unavailable
from scheduler_svc.link.session import ExecutorSession, SessionLost
from scheduler_svc.text.bundle import BadBundle
from scheduler_svc.text.bundle_cache import TokenizerCache
from scheduler_svc.text.tokenizer import Tokenizer

log = structlog.get_logger()


class ServedText:
    """Text to ids and back, off the event loop. Unavailable until a tokenizer has been loaded."""

    def __init__(self, cache_dir: Path) -> None:
        self._cache = TokenizerCache(cache_dir)
        self._tokenizer: Tokenizer | None = None
        self._hash = ""
        self._bundle: bytes | None = None  # of the tokenizer in use, where the cache could not keep it
        self._loading = asyncio.Lock()

    @property
    def is_loaded(self) -> bool:
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise Unavailable("no executor has been attached yet, so no tokenizer is known; try again later")
        return self._tokenizer

    def forget(self, keep: str) -> None:
        """Unavailable until another one has been loaded, unless this is the hash of the one in use."""
        if self._hash != keep:
            self._tokenizer, self._hash, self._bundle = None, "", None

    async def load(self, tokenizer_hash: str, session: ExecutorSession) -> None:
        """Make the tokenizer of that hash the one in use. Raises SessionLost if it cannot be had or used."""
        async with self._loading:  # several executors may bring the same
            if self._hash != tokenizer_hash:
                await self._load(tokenizer_hash, session)

    async def _load(self, tokenizer_hash: str, session: ExecutorSession) -> None:
        try:
            data = await self._cached(tokenizer_hash)
            is_kept = data is not None
            if data is None:
                data = await session.fetch_tokenizer()
                is_kept = await self._keep(tokenizer_hash, data)
            self._bundle = None if is_kept else data
            self._tokenizer = await asyncio.to_thread(Tokenizer.from_bundle, data)
        except BadBundle as error:
            raise SessionLost(f"the executor's tokenizer cannot be used: {error}", refused=True) from error
        self._hash = tokenizer_hash

    async def _cached(self, tokenizer_hash: str) -> bytes | None:
        try:
            return await asyncio.to_thread(self._cache.get, tokenizer_hash)
        except OSError as error:
            log.warning("tokenizer_cache_unreadable", reason=str(error))
            return None

    async def _keep(self, tokenizer_hash: str, data: bytes) -> bool:
        try:
            await asyncio.to_thread(self._cache.put, tokenizer_hash, data)
        except OSError as error:
            log.warning("tokenizer_cache_unwritable", reason=str(error))
            return False
        return True

    async def bundle(self) -> bytes:
        """What the tokenizer was loaded from. Raises Unavailable if others have pushed it out of the cache."""
        data = self._bundle or (await self._cached(self._hash) if self._hash else None)
        if data is None:
            raise Unavailable("the tokenizer's files are not at hand; restart the scheduler to have them fetched anew")
        return data

    def check_bytes(self, num_bytes: int, max_tokens: int) -> None:
        """Raises InvalidRequest where a text of so many bytes of UTF-8 is certain to have `max_tokens` or more."""
        _check_length(self.tokenizer.lower_bound_of_bytes(num_bytes), max_tokens, "text")

    async def tokenize(self, text: str, max_tokens: int | None) -> list[int]:
        """Raises InvalidRequest, before the work, where the text is certain to have `max_tokens` or more, if given."""
        if max_tokens is not None:
            _check_length(self.tokenizer.lower_bound_tokens(text), max_tokens, "text")
        return await asyncio.to_thread(self.tokenizer.encode, text)

    async def tokenize_chat(self, messages: list[dict[str, str]], max_tokens: int | None) -> list[int]:
        """As `tokenize`, for a conversation in the model's template."""
        text = await asyncio.to_thread(self.tokenizer.render_chat, messages)
        if max_tokens is not None:
            _check_length(self.tokenizer.lower_bound_tokens(text), max_tokens, "chat")
        return await asyncio.to_thread(self.tokenizer.encode_rendered_chat, text)

    async def spellings(self, words: list[str]) -> list[list[list[int]]]:
        """Of each word the ids of its spellings."""
        return await asyncio.to_thread(lambda: [self.tokenizer.spellings(word) for word in words])

    async def detokenize(self, ids: list[int], skip_special_tokens: bool) -> str:
        return await asyncio.to_thread(self.tokenizer.decode, ids, skip_special_tokens)


def _check_length(at_least: int, max_tokens: int, field: str) -> None:
    if at_least >= max_tokens:
        reason = f"is at least {at_least} tokens long; prompt and output together may have {max_tokens}"
        raise InvalidRequest(FieldViolation(field, reason))
