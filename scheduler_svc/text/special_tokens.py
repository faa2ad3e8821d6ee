"""Special tokens as tokenizer_config.json and special_tokens_map.json name them."""

from typing import Any

import tokenizers

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def special_token_texts(config: dict[str, Any], special_tokens_map: dict[str, Any]) -> dict[str, str]:
    """Name to text, such as `bos_token` to `<s>`, of those that are set. The configuration goes before the map."""
    texts = {}
    for name in NAMES:
        text = _token_text(config[name] if name in config else special_tokens_map.get(name))
        if text is not None:
            texts[name] = text
    return texts


def add_missing_tokens(library: tokenizers.Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]) -> None:
    """Add the tokens that the configuration names and tokenizer.json lacks, as transformers does."""
    library.add_tokens([token for token in _stated_tokens(config) if library.token_to_id(token.content) is None])
    library.add_special_tokens([text for text in special_tokens.values() if library.token_to_id(text) is None])


def _stated_tokens(config: dict[str, Any]) -> list[tokenizers.AddedToken]:
    """The tokens that the configuration lists by id, in the order of their ids."""
    stated = config.get("added_tokens_decoder") or {}
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return [
        tokenizers.AddedToken(value["content"], **{flag: bool(value[flag]) for flag in flags if flag in value})
        for _, value in sorted(stated.items(), key=lambda item: int(item[0]))
    ]


def _token_text(value: Any) -> str | None:
    """A token is written as its text, or as an object that has its text as `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
