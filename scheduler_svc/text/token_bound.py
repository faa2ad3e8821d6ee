"""How much text a single token can stand for."""

import json
import math
from typing import Any

import tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

_MOST_BYTES_PER_CHAR = 4  # of UTF-8
MOST_IDS = 1 << 21  # where a search for the last token ends
# What special tokens may swallow next to them: Unicode's White_Space.
_SPACES = "".join(character for character in map(chr, range(0x3001)) if character.isspace())


class TokenBound:
    """A lower bound of the tokens of a text, a thousand times cheaper than to tokenize it."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._max_chars_per_token = max_chars_per_token(library)
        added = library.get_added_tokens_decoder().values()
        self._spaces = _SPACES if any(token.lstrip or token.rstrip for token in added) else ""

    def at_least(self, text: str) -> int:
        """0 where nothing is known."""
        if self._max_chars_per_token is None:
            return 0
        num_chars = len(text) - sum(map(text.count, self._spaces))
        return -(-num_chars // self._max_chars_per_token)

    def at_least_of_bytes(self, num_bytes: int) -> int:
        """Of any text of so many bytes of UTF-8; 0 where nothing is known."""
        if self._max_chars_per_token is None or self._spaces:  # it may be nothing but spaces
            return 0
        return -(-num_bytes // (_MOST_BYTES_PER_CHAR * self._max_chars_per_token))


def max_chars_per_token(library: tokenizers.Tokenizer) -> int | None:
    """Upper bound of the characters of a text that one token of it stands for; None where there is no bound.

    There is one where every part of a text ends up in a token: BPE over all 256 bytes, without steps that remove
    text. (An unknown word that becomes one token has no bound.) Spaces next to a special token that swallows them do
    not count.
    """
    steps = [*_steps(component(library.normalizer)), *_steps(component(library.pre_tokenizer))]
    shrinkage = [_most_chars_for_one(step) for step in steps]
    if None in shrinkage or not _covers_all_bytes(library, steps):
        return None
    longest = _longest_token(library)
    return math.prod(factor for factor in shrinkage if factor is not None) * longest or None


def _longest_token(library: tokenizers.Tokenizer) -> int:
    """In bytes; 0 where not all tokens are found. Ids may have holes between them."""
    # One id at a time: the whole vocabulary as Python objects would take tens of megabytes.
    num_left, longest = library.get_vocab_size(with_added_tokens=True), 0
    for token_id in range(MOST_IDS):
        if not num_left:
            return longest
        token = library.id_to_token(token_id)
        if token is not None:
            num_left -= 1
            longest = max(longest, len(token.encode()))
    return 0


def component(part: Any) -> dict[str, Any] | None:
    """A part of the library's tokenizer as the JSON object that tokenizer.json has for it."""
    return None if part is None else json.loads(part.__getstate__())


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    inner = part.get("normalizers") or part.get("pretokenizers") or []
    return [step for entry in inner for step in _steps(entry)]


def _most_chars_for_one(step: dict[str, Any]) -> int | None:
    """How many characters before the step can be one character after it; None: any number."""
    match step["type"]:
        case "ByteLevel" | "Prepend" | "Metaspace" | "Digits":
            return 1
        case "NFC":
            return 4  # the longest canonical decomposition
        case "Split":
            return None if step["behavior"] == "Removed" else 1
        case "Replace":
            pattern = step["pattern"].get("String")
            return 1 if pattern is not None and len(pattern) <= len(step["content"]) else None
    return None


def _covers_all_bytes(library: tokenizers.Tokenizer, steps: list[dict[str, Any]]) -> bool:
    model = library.model
    if not isinstance(model, BPE):
        return False
    if any(step["type"] == "ByteLevel" for step in steps):
        alphabet = ByteLevel.alphabet()
    elif model.byte_fallback:
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return False
    return all(library.token_to_id(token) is not None for token in alphabet)
