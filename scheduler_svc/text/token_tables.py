"""What each token stands for, looked up once for each token of the vocabulary.

A table is a list, because the way from id to text runs once a generated token. It is shared by all sequences, and made
as a whole: entries made as tokens are met would lie amid what comes and goes with answers, and keep its pages.
"""

import re
from collections.abc import Iterator
from typing import Self

import tokenizers

from scheduler_svc.text.token_bound import MOST_IDS

_BYTE_TOKEN = re.compile(r"<0x([+0-9A-Fa-f][0-9A-Fa-f])>")


class VisibleTokens:
    """Id to token as the tokenizer's decoder is given it: None for one that never gets there.

    Those are ids outside the vocabulary and, with `skip_special_tokens`, special tokens. Nothing is kept.
    """

    def __init__(self, library: tokenizers.Tokenizer, skip_special_tokens: bool) -> None:
        self._library = library
        added = library.get_added_tokens_decoder().values() if skip_special_tokens else ()
        self._skipped = frozenset(token.content for token in added if token.special)

    def __getitem__(self, token_id: int) -> str | None:
        token = self._library.id_to_token(token_id)
        return None if token in self._skipped else token

    def all(self) -> Iterator[str | None]:
        """By id, from 0 to the last of the vocabulary; but to no id from MOST_IDS on."""
        num_left = self._library.get_vocab_size(with_added_tokens=True)
        for token_id in range(MOST_IDS):
            if not num_left:
                return
            token = self._library.id_to_token(token_id)
            num_left -= token is not None
            yield None if token in self._skipped else token


class ByteLevelTable(list[bytes]):
    """Id to bytes, for byte-level tokenizers, which write each byte of a token as one printable character."""

    def __init__(self, visible: VisibleTokens, whole: Self | None = None) -> None:
        """`whole` is that of the same tokenizer with all of its tokens visible."""
        self._visible = visible
        self._byte_of = _bytes_by_character()
        if whole is None:
            super().__init__(map(self._data, visible.all()))
        else:
            super().__init__(b"" if token is None else data for token, data in zip(visible.all(), whole, strict=True))
        self.known = self.__getitem__  # of ids below the table's length

    def of(self, token_id: int) -> bytes:
        """Of any id, whatever the table's length."""
        return self[token_id] if token_id < len(self) else self._data(self._visible[token_id])

    def _data(self, token: str | None) -> bytes:
        if token is None:
            return b""
        try:
            return bytes([self._byte_of[character] for character in token])
        except KeyError:
            # An added token may be any text; one foreign character makes all of it plain text.
            return token.encode()


class ByteFallbackTable(list[str | int | None]):
    """Id to text, or to the byte that a token `<0x..>` stands for; None for a token without a part in the text."""

    def __init__(self, visible: VisibleTokens, replaced: str, replacement: str, whole: Self | None = None) -> None:
        """`whole` is that of the same tokenizer with all of its tokens visible."""
        self._visible = visible
        self._replaced = replaced
        self._replacement = replacement
        if whole is None:
            super().__init__(map(self._piece, visible.all()))
        else:
            super().__init__(
                None if token is None else piece for token, piece in zip(visible.all(), whole, strict=True)
            )

    def of(self, token_id: int) -> str | int | None:
        """Of any id, whatever the table's length."""
        return self[token_id] if token_id < len(self) else self._piece(self._visible[token_id])

    def _piece(self, token: str | None) -> str | int | None:
        if token is None:
            return None
        byte = _BYTE_TOKEN.fullmatch(token)
        return int(byte[1], 16) if byte else token.replace(self._replaced, self._replacement)


def _bytes_by_character() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 bytes are themselves, the others follow from U+0100 on."""
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(themselves))
    table = {chr(byte): byte for byte in themselves}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table
