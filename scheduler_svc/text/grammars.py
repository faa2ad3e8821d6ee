"""Grammars: which tokens may come next, so that the text becomes one that the grammar allows.

The library is llguidance. It is imported with the first grammar, so that who has none does not pay for it.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.token_rules import allows
from scheduler_svc.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

_MARK = "\x02"
MAX_KEPT = 64  # compiled grammars, least recently used first
SLOW_S = 0.01  # of a processor, for one token; masks of usual grammars take less than a tenth of that
MAX_SLOW_S = 1.0  # for all tokens of a request together, beyond SLOW_S for each


@dataclass(frozen=True, slots=True)
class Grammar:
    """`kind` is a field of the message `Grammar` of inference.proto; `source` its value, a tuple for `choice`."""

    kind: str
    source: str | tuple[str, ...]


class UnusableGrammar(Exception):
    """The grammar cannot be compiled for the model's tokens."""


class GrammarStuck(Exception):
    """No token can follow, or to find out which has become too complex."""


class NotAllowed(Exception):
    """A token was drawn that no mask had allowed."""


class _Patience:
    """With the masks of one request, all its answers together.

    Others wait while one is made. Where a text can be read in many ways, as by `s: s s | "a"`, each takes longer than
    the one before, without end.
    """

    def __init__(self) -> None:
        self._left_s = MAX_SLOW_S

    def spend(self, seconds: float) -> None:
        """Raises GrammarStuck."""
        self._left_s -= max(0.0, seconds - SLOW_S)
        if self._left_s < 0:
            raise GrammarStuck("to find out what may come next takes too long; can its rules read a text in many ways?")


class Matcher:
    """One answer's place in its grammar. Made by `Grammars.matcher`."""

    def __init__(
        self,
        grammar: Grammar,
        matcher: "llguidance.LLMatcher",
        text_ids: NDArray[np.uint8],
        end_ids: NDArray[np.uint8],
        patience: _Patience | None = None,
    ) -> None:
        self.grammar = grammar
        self._matcher = matcher
        self._text_ids, self._end_ids = text_ids, end_ids
        self._patience = patience or _Patience()
        self._mask = b""  # the last one

    def copy(self) -> "Matcher":
        """Another one of the same request, at the same place."""
        copied = Matcher(self.grammar, self._matcher.deep_copy(), self._text_ids, self._end_ids, self._patience)
        copied._mask = self._mask
        return copied

    def follow(self, ids: Sequence[int]) -> bytes | None:
        """Go on by these tokens; the mask of what may come next, as in `StepPlan.masks`, or None where nothing may.

        Raises GrammarStuck, NotAllowed.
        """
        begin = time.thread_time()
        mask = self._follow(ids)
        if ids:  # the first mask stops nobody: it is made on a thread of its own
            self._patience.spend(time.thread_time() - begin)
        return mask

    def _follow(self, ids: Sequence[int]) -> bytes | None:
        if ids and not self._matcher.consume_tokens(list(ids)):
            # Of text that the model has no token for the library may allow what it does not take.
            was_allowed = len(ids) == 1 and ids[0] < 8 * len(self._mask) and allows(self._mask, ids[0])
            raise (GrammarStuck if was_allowed else NotAllowed)(self._matcher.get_error())
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: len(self._text_ids)] & self._text_ids
        if self._matcher.is_error():
            raise GrammarStuck(self._matcher.get_error())
        accepting = self._matcher.is_accepting()
        if not mask.any():
            if accepting:
                return None
            raise GrammarStuck("no token of the model can follow")
        self._mask = (mask | self._end_ids if accepting else mask).tobytes()
        return self._mask


class _Vocabulary:
    """A tokenizer as llguidance wants to see it. Which tokens end a text is each request's own affair: one more token
    than there are does that here, and never leaves this room."""

    def __init__(self, tokenizer: Tokenizer, pieces: list[bytes | None]) -> None:
        size = len(pieces)
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = size, None
        self.special_token_ids = [i for i, piece in enumerate(pieces) if piece is None]
        self.special_token_ids.append(size)
        self.tokens = [b"\xff<%d>" % i if piece is None else piece for i, piece in enumerate(pieces)]
        self.tokens.append(b"\xff<%d>" % size)
        self._bytes = {piece[0]: i for i, piece in enumerate(pieces) if piece is not None and len(piece) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        """Ids whose pieces are the text: the tokenizer's own behind a mark, as it may treat a text's begin otherwise;
        byte by byte where it has none."""
        data = text.encode() if isinstance(text, str) else text
        mark, ids = (
            self._tokenizer.encode_part(_MARK),
            self._tokenizer.encode_part(_MARK + data.decode(errors="ignore")),
        )
        ids = ids[len(mark) :] if ids[: len(mark)] == mark else []
        if b"".join(self.tokens[i] for i in ids if i < self.eos_token_id) == data:  # the model may lack some
            return ids
        return [self._bytes[byte] for byte in data if byte in self._bytes]


class Grammars:
    """Compiles grammars for one model's tokens. Safe to use from several threads at once."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._lock = threading.Lock()  # of what is kept; never held for long
        self._turn = threading.Lock()  # one is compiled at a time
        self._text_ids = self._bits(())  # those with a text of their own, once pieces are known
        self._tokens: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, llguidance.LLMatcher] = OrderedDict()

    def knows(self, grammar: Grammar) -> bool:
        """Whether it has been compiled, and is kept."""
        with self._lock:
            return grammar in self._compiled

    def compile(self, grammar: Grammar) -> None:
        """Have it kept: a second for the first one of a large vocabulary, then as long as the worker took to try it.
        Raises UnusableGrammar."""
        self._keep(grammar, self._compile(grammar))

    def matcher(self, grammar: Grammar, end_token_ids: Iterable[int]) -> Matcher:
        """At the beginning of a text that these tokens end. Compiles what is not kept. Raises UnusableGrammar."""
        with self._lock:
            compiled = self._compiled.get(grammar)
        compiled = compiled or self._compile(grammar)
        self._keep(grammar, compiled)
        ends = self._bits(end_token_ids)
        return Matcher(grammar, compiled.deep_copy(), self._text_ids & ~ends, ends)

    def _keep(self, grammar: Grammar, compiled: "llguidance.LLMatcher") -> None:
        with self._lock:
            self._compiled[grammar] = compiled
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)

    def _compile(self, grammar: Grammar) -> "llguidance.LLMatcher":
        import llguidance

        from scheduler_svc.text.grammar_worker import grammar_of, limits

        try:
            source = grammar_of(grammar.kind, grammar.source)
        except ValueError as error:
            raise UnusableGrammar(str(error)) from error
        with self._turn:
            compiled = llguidance.LLMatcher(self._library_tokens(), source, log_level=0, limits=limits())
        if compiled.is_error():
            raise UnusableGrammar(compiled.get_error())
        return compiled

    def _library_tokens(self) -> "llguidance.LLTokenizer":
        if self._tokens is None:
            import llguidance

            pieces = self.tokenizer.token_bytes(self.vocab_size)
            if pieces is None:
                raise UnusableGrammar("the model's tokenizer is of a kind that grammars cannot be used with")
            # From pieces: while the library loads a tokenizer.json, seconds for a large one, nothing else can run.
            vocabulary = llguidance.TokenizerWrapper(_Vocabulary(self.tokenizer, pieces))
            self._tokens = llguidance.LLTokenizer(vocabulary)
            # A Lark grammar may name ids as they are, <[0]>.
            self._text_ids = self._bits(i for i, piece in enumerate(pieces) if piece is not None)
        return self._tokens

    def _bits(self, ids: Iterable[int]) -> NDArray[np.uint8]:
        bits = np.zeros(-(-self.vocab_size // 32) * 32, np.bool_)
        bits[[i for i in ids if i < self.vocab_size]] = True
        return np.packbits(bits, bitorder="little")
