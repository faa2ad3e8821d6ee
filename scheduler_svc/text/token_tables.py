"""What each token stands for, looked up once for each token that is met.

A table is a dict that fills itself, because the way from id to text runs once a generated token. It is bounded by the
vocabulary, and shared by all sequences.
"""

import re

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([+0-9A-Fa-f][0-9A-Fa-f])>")


class VisibleTokens(dict[int, str | None]):
    """Id to token as the tokenizer's decoder is given it: None for one that never gets there.

    Those are ids outside the vocabulary and, with `skip_special_tokens`, special tokens.
    """

    def __init__(self, library: tokenizers.Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self._library = library
        added = library.get_added_tokens_decoder().values() if skip_special_tokens else ()
        self._skipped = frozenset(token.content for token in added if token.special)

    def __missing__(self, token_id: int) -> str | None:
        token = self._library.id_to_token(token_id)
        if token is None:
            # Not kept: there is no end to ids that mean nothing.
            return None
        visible = None if token in self._skipped else token
        self[token_id] = visible
        return visible


class ByteLevelTable(dict[int, bytes]):
    """Id to bytes, for byte-level tokenizers, which write each byte of a token as one printable character."""

    def __init__(self, visible: VisibleTokens) -> None:
        super().__init__()
        self._visible = visible
        self._byte_of = _bytes_by_character()

    def __missing__(self, token_id: int) -> bytes:
        token = self._visible[token_id]
        if token is None:
            return b""
        try:
            data = bytes([self._byte_of[character] for character in token])
        except KeyError:
            # An added token may be any text; one foreign character makes all of it plain text.
            data = token.encode()
        self[token_id] = data
        return data


class ByteFallbackTable(dict[int, str | int | None]):
    """Id to text, or to the byte that a token `<0x..>` stands for; None for a token without a part in the text."""

    def __init__(self, visible: VisibleTokens, replaced: str, replacement: str) -> None:
        super().__init__()
        self._visible = visible
        self._replaced = replaced
        self._replacement = replacement

    def __missing__(self, token_id: int) -> str | int | None:
        token = self._visible[token_id]
        if token is None:
            return None
        byte = _BYTE_TOKEN.fullmatch(token)
        piece = int(byte[1], 16) if byte else token.replace(self._replaced, self._replacement)
        self[token_id] = piece
        return piece


def _bytes_by_character() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 bytes are themselves, the others follow from U+0100 on."""
    themselves = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(themselves))
    table = {chr(byte): byte for byte in themselves}
    table.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return table
