"""Incremental decoders: ids in, text that is final out. `detokenizer.py` puts one to work for a sequence.

Which one fits depends on how the model's tokenizer puts texts together (`decoder_makers`). Two families cover nearly
all models and are done here with a table look-up a token; any other is asked through `WindowDecoder`.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tokenizers

from scheduler_svc.text.token_bound import component
from scheduler_svc.text.token_tables import ByteFallbackTable, ByteLevelTable, VisibleTokens
from scheduler_svc.text.window_decoder import WindowDecoder

# Bytes of fallback tokens that wait for the end of their run. Longer runs are given out character by character.
MAX_HELD_BYTES = 32
_BROKEN = "\ufffd"
_UTF8_DECODER = codecs.getincrementaldecoder("utf-8")
_decode_begin = codecs.utf_8_decode


class IncrementalDecoder(Protocol):
    """Decodes one sequence, a few tokens at a time."""

    def prime(self, prompt_ids: Sequence[int]) -> None:
        """Begin behind a prompt, whose text is not given out. Looks at the prompt's ends only."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens make final."""

    def pending(self) -> str:
        """Finished characters that the next token could still turn into broken ones."""

    def rest(self) -> str:
        """What would be given out if nothing followed. Changes nothing."""


DecoderMaker = Callable[[], IncrementalDecoder]


def decoder_makers(library: tokenizers.Tokenizer) -> dict[bool, DecoderMaker]:
    """Functions that make decoders of the kind that suits the library's tokenizer, by whether special tokens are
    skipped; all decoders of one function share one table."""
    whole, skipping = VisibleTokens(library, False), VisibleTokens(library, True)
    decoder = component(library.decoder)
    steps = decoder["decoders"] if decoder is not None and decoder["type"] == "Sequence" else [decoder]
    if [step and step["type"] for step in steps] == ["ByteLevel"]:
        byte_level = ByteLevelTable(whole)
        rest = ByteLevelTable(skipping, byte_level)
        return {False: lambda: ByteLevelDecoder(byte_level), True: lambda: ByteLevelDecoder(rest)}
    if (fallback := _byte_fallback(steps)) is not None:
        replaced, replacement, stripped, num_stripped = fallback
        table = ByteFallbackTable(whole, replaced, replacement)
        pieces = ByteFallbackTable(skipping, replaced, replacement, table)
        return {
            False: lambda: ByteFallbackDecoder(table, stripped, num_stripped),
            True: lambda: ByteFallbackDecoder(pieces, stripped, num_stripped),
        }
    return {False: lambda: WindowDecoder(library, whole), True: lambda: WindowDecoder(library, skipping)}


def token_bytes(library: tokenizers.Tokenizer, num_ids: int) -> list[bytes | None] | None:
    """What each id below `num_ids` adds to a text, None for one without a text of its own: special tokens, and what is
    not in the vocabulary, which may have gaps.

    None in all where tokens are not pieces of a text, as with decoders that put spaces between them.
    """
    visible = VisibleTokens(library, skip_special_tokens=True)
    decoder = component(library.decoder)
    steps = decoder["decoders"] if decoder is not None and decoder["type"] == "Sequence" else [decoder]
    if [step and step["type"] for step in steps] == ["ByteLevel"]:
        byte_level = ByteLevelTable(visible)
        return [byte_level.of(i) or None for i in range(num_ids)]
    if (fallback := _byte_fallback(steps)) is None:
        return None
    table = ByteFallbackTable(visible, *fallback[:2])
    pieces = [table.of(i) for i in range(num_ids)]
    return [bytes([p]) if isinstance(p, int) else p.encode() if p else None for p in pieces]


def _byte_fallback(steps: list[Any]) -> tuple[str, str, str, int] | None:
    """Replace, ByteFallback, Fuse and perhaps Strip at the left, as sentencepiece models are converted."""
    match steps:
        case [
            {"type": "Replace", "pattern": {"String": replaced}, "content": replacement},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *strip,
        ]:
            match strip:
                case []:
                    return replaced, replacement, "", 0
                case [{"type": "Strip", "content": stripped, "start": num_stripped, "stop": 0}]:
                    return replaced, replacement, stripped, num_stripped
    return None


class ByteLevelDecoder:
    """Tokens are bytes; a character is final once its last byte is there, or it is known never to come."""

    __slots__ = ("_held", "_table")

    def __init__(self, table: ByteLevelTable) -> None:
        self._table = table
        self._held = b""  # the beginning of a character

    def prime(self, prompt_ids: Sequence[int]) -> None:
        # An unfinished character has at most three bytes.
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._table.of(token_id) + tail
            if len(tail) > 3:
                break
        self._decode(tail)

    def push(self, ids: Sequence[int]) -> str:
        table = self._table
        try:
            data = table[ids[0]] if len(ids) == 1 else b"".join(map(table.known, ids))
        except IndexError:  # of logits there may be more than of tokens
            data = b"".join(map(table.of, ids))
        if data.isascii() and not self._held:  # most of it, and a third of the time
            return data.decode("ascii")
        return self._decode(data)

    def pending(self) -> str:
        return ""

    def rest(self) -> str:
        return self._held.decode("utf-8", "replace")

    def _decode(self, data: bytes) -> str:
        data = self._held + data
        text, num_used = _decode_begin(data, "replace", False)
        self._held = data[num_used:]
        return text


class ByteFallbackDecoder:
    """Tokens are texts or single bytes.

    The library gives a run of byte tokens as text if all of it is UTF-8, and otherwise U+FFFD for each byte. So a
    run is held until it ends, it is broken for certain, or it has MAX_HELD_BYTES: then its finished characters are
    given out, and only what follows can still be broken.
    """

    __slots__ = ("_broken", "_finished", "_num_to_strip", "_run", "_stripped", "_table", "_utf8")

    def __init__(self, table: ByteFallbackTable, stripped: str, num_to_strip: int) -> None:
        self._table = table
        self._stripped = stripped
        self._num_to_strip = num_to_strip  # characters that the text may still lose at its very beginning
        self._utf8 = _UTF8_DECODER("strict")
        self._run = bytearray()
        self._finished = ""  # the run's finished characters
        self._broken = False

    def prime(self, prompt_ids: Sequence[int]) -> None:
        begin = self._begin_of_last_run(prompt_ids)
        for i in range(begin):
            if not self._num_to_strip:
                break
            self.push(prompt_ids[i : i + 1])
        self._end_run()
        self.push(prompt_ids[begin:])

    def push(self, ids: Sequence[int]) -> str:
        table, out = self._table, []
        for token_id in ids:
            piece = table[token_id] if token_id < len(table) else table.of(token_id)
            if isinstance(piece, str):
                if self._run or self._broken:
                    out.append(self._end_run())
                out.append(piece)
            elif piece is not None:
                out.append(self._push_byte(piece))
        text = out[0] if len(out) == 1 else "".join(out)
        return self._strip(text) if self._num_to_strip and text else text

    def pending(self) -> str:
        return self._finished

    def rest(self) -> str:
        text = self._text_of_run()
        return text.removeprefix(self._stripped) if self._num_to_strip else text

    def _push_byte(self, byte: int) -> str:
        if self._broken:
            return _BROKEN
        self._run.append(byte)
        try:
            self._finished += self._utf8.decode(bytes((byte,)))
        except UnicodeDecodeError:
            text = _BROKEN * len(self._run)
            self._forget_run()
            self._broken = True
            return text
        if len(self._run) < MAX_HELD_BYTES:
            return ""
        text, self._finished = self._finished, ""
        self._run = bytearray(self._utf8.getstate()[0])
        return text

    def _end_run(self) -> str:
        text = self._text_of_run()
        self._forget_run()
        self._broken = False
        return text

    def _text_of_run(self) -> str:
        if self._utf8.getstate()[0]:
            return _BROKEN * len(self._run)
        return self._finished

    def _forget_run(self) -> None:
        self._run.clear()
        self._finished = ""
        self._utf8.reset()

    def _strip(self, text: str) -> str:
        while self._num_to_strip and text.startswith(self._stripped):
            text = text[len(self._stripped) :]
            self._num_to_strip -= 1
        if text:
            self._num_to_strip = 0
        return text

    def _begin_of_last_run(self, ids: Sequence[int]) -> int:
        # Longer runs than this are no longer held as a whole anyway.
        first = max(0, len(ids) - 2 * MAX_HELD_BYTES)
        begin = len(ids)
        while begin > first and not isinstance(self._table.of(ids[begin - 1]), str):
            begin -= 1
        return begin
