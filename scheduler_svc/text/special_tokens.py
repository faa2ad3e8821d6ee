"""Special tokens as tokenizer_config.json and special_tokens_map.json name them."""

from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def special_token_texts(config: dict[str, Any], special_tokens_map: dict[str, Any]) -> dict[str, str]:
    """Name to text, such as `bos_token` to `<s>`, of those that are set. The configuration goes before the map."""
    texts = {}
    for name in NAMES:
        text = _token_text(config[name] if name in config else special_tokens_map.get(name))
        if text is not None:
            texts[name] = text
    return texts


def apply_special_tokens(library: tokenizers.Tokenizer, config: dict[str, Any], special_tokens: dict[str, str]) -> None:
    """Bring the library's tokenizer in line with the configuration, as transformers does when it loads one."""
    library.add_tokens([token for token in _stated_tokens(config) if library.token_to_id(token.content) is None])
    library.add_special_tokens([text for text in special_tokens.values() if library.token_to_id(text) is None])
    if "add_bos_token" in config or "add_eos_token" in config:
        begin = special_tokens.get("bos_token") if config.get("add_bos_token") else None
        end = special_tokens.get("eos_token") if config.get("add_eos_token") else None
        library.post_processor = _surrounded(library, begin, end)


def _surrounded(library: tokenizers.Tokenizer, begin: str | None, end: str | None) -> TemplateProcessing:
    added = [text for text in (begin, end) if text is not None]
    pieces = [*([begin] if begin else []), "$A", *([end] if end else [])]
    return TemplateProcessing(
        single=" ".join(pieces),
        pair=None,
        special_tokens=[(text, library.token_to_id(text)) for text in added],
    )


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
