"""One model, known by its name: its facts, its text, the executors that compute it, and who waits for one."""

import time
from collections.abc import Mapping
from pathlib import Path

from paged.v1 import executor_pb2 as pb
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.drain_rate import AdmissionRate
from scheduler_svc.driver import Driver
from scheduler_svc.link.session import ExecutorSession
from scheduler_svc.served_text import ServedText
from scheduler_svc.text.grammars import Grammars


class ServedModel:
    """`executors` are those in use; `waiting`, a scheduler that is never attached, holds the requests for which there
    is none. `longest` bounds sequences where the model allows more."""

    def __init__(self, attached: pb.Attached, waiting: Scheduler, cache_dir: Path, longest: int | None) -> None:
        self.facts = attached.model  # of the executor that takes the longest sequences
        self.waiting = waiting
        self.executors: list[Driver] = []
        self.lost_at = time.monotonic()  # when the last of them was
        self.admission_rate = AdmissionRate()
        self._text = ServedText(cache_dir)
        self._tokenizer_hash = attached.tokenizer_hash
        self._longest = longest
        self._grammars: Grammars | None = None

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def is_ready(self) -> bool:
        """Whether requests can be taken in: its tokenizer is known."""
        return self._text.is_loaded

    @property
    def schedulers(self) -> list[Scheduler]:
        """Of the executors in use."""
        return [executor.scheduler for executor in self.executors]

    def note_admissions(self, now: float) -> None:
        """Regularly."""
        states = [scheduler.state for scheduler in self.schedulers]
        num_admitted = sum(state.counters.admitted for state in states)
        some_wait = bool(states) and all(state.leaves_some_waiting for state in states)
        self.admission_rate.note(now, num_admitted, some_wait=some_wait)

    @property
    def without_executor_s(self) -> float:
        """How long there has been none."""
        return 0.0 if self.executors else time.monotonic() - self.lost_at

    def difference(self, attached: pb.Attached) -> str:
        """What keeps this executor from being used beside others of the model, or nothing: answers that were begun on
        one could not go on on the other, or prefixes would be known by other hashes."""
        for name, own, other in (
            ("fingerprint", self.facts.fingerprint, attached.model.fingerprint),
            ("block_size", self.facts.block_size, attached.model.block_size),
            ("tokenizer_hash", self._tokenizer_hash, attached.tokenizer_hash),
        ):
            if own != other:
                return f"{name} is {other}, and {own} of those in use"
        return ""

    def become(self, attached: pb.Attached) -> None:
        """It is what this executor says from now on, and not ready before its tokenizer has been loaded."""
        self.facts, self._tokenizer_hash = attached.model, attached.tokenizer_hash
        self._text.forget(keep=attached.tokenizer_hash)

    async def load(self, session: ExecutorSession) -> None:
        """Get the tokenizer, unless it is in use already. Raises SessionLost."""
        await self._text.load(self._tokenizer_hash, session)

    def begin(self, executor: Driver) -> None:
        """The executor is in use from now on."""
        self.executors.append(executor)
        attached = [executor.attached.model for executor in self.executors if executor.attached is not None]
        self.facts = max(attached, key=lambda facts: facts.max_model_len)

    def end(self, executor: Driver) -> None:
        """It is lost. Harmless for one that was not in use."""
        if executor in self.executors:
            self.executors.remove(executor)
            self.lost_at = time.monotonic()

    # --- text ---

    @property
    def text(self) -> ServedText:
        return self._text

    @property
    def has_chat_template(self) -> bool:
        return self._text.is_loaded and self._text.tokenizer.has_chat_template

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        return self._text.tokenizer.sampling_defaults

    @property
    def model_type(self) -> str:
        return self._text.tokenizer.model_type

    async def tokenizer_bundle(self) -> bytes:
        return await self._text.bundle()

    @property
    def grammars(self) -> Grammars:
        """What its tokenizer makes of grammars."""
        tokenizer, vocab_size = self._text.tokenizer, self.facts.vocab_size
        grammars = self._grammars
        if grammars is None or grammars.tokenizer is not tokenizer or grammars.vocab_size != vocab_size:
            grammars = self._grammars = Grammars(tokenizer, vocab_size)
        return grammars

    def check_text_bytes(self, num_bytes: int) -> None:
        self._text.check_bytes(num_bytes, self._max_model_len)

    async def tokenize(self, text: str, *, bounded: bool = True) -> list[int]:
        return await self._text.tokenize(text, self._max_model_len if bounded else None)

    async def tokenize_chat(self, messages: list[dict[str, str]], *, bounded: bool = True) -> list[int]:
        return await self._text.tokenize_chat(messages, self._max_model_len if bounded else None)

    async def detokenize(self, ids: list[int], skip_special_tokens: bool) -> str:
        return await self._text.detokenize(ids, skip_special_tokens)

    async def spellings(self, words: list[str]) -> list[list[list[int]]]:
        return await self._text.spellings(words)

    @property
    def _max_model_len(self) -> int:
        return min(self.facts.max_model_len, self._longest or self.facts.max_model_len)
