"""The simulated model's tokenizer: bytes in, and any id below the vocabulary's size out as text.

Ids 0 to 255 are the bytes, 256 is <s>, 257 is </s>. Ids from 258 on are never made from text; each stands for a space
and a word of letters of its own, so that what the simulated model says can be read.
"""

import io
import json
import zipfile

BOS_ID = 256
EOS_ID = 257
_NUM_SPECIAL = 258
_MADE_AT = (1980, 1, 1, 0, 0, 0)  # the earliest a zip can hold: equal settings give equal bytes

_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make_bundle(vocab_size: int, max_model_len: int, eos_id: int) -> bytes:
    """A zip as the real loader makes it: tokenizer.json, tokenizer_config.json, config.json, generation_config.json."""
    files = {
        "config.json": {
            "architectures": ["simulated"],
            "vocab_size": vocab_size,
            "max_position_embeddings": max_model_len,
            "bos_token_id": BOS_ID,
            "eos_token_id": eos_id,
        },
        "generation_config.json": {"bos_token_id": BOS_ID, "eos_token_id": eos_id},
        "tokenizer.json": _tokenizer(vocab_size),
        "tokenizer_config.json": {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "model_max_length": max_model_len,
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT_TEMPLATE,
        },
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in files.items():
            archive.writestr(
                zipfile.ZipInfo(name, _MADE_AT),
                json.dumps(content, ensure_ascii=False, separators=(",", ":")),
                zipfile.ZIP_DEFLATED,
                compresslevel=1,
            )
    return buffer.getvalue()


def _tokenizer(vocab_size: int) -> dict[str, object]:
    """A `tokenizers` file: byte-level BPE that knows no merges."""
    characters = _byte_characters()
    vocab = {character: byte for byte, character in enumerate(characters)}
    vocab["<s>"] = BOS_ID
    vocab["</s>"] = EOS_ID
    space = characters[ord(" ")]
    for number in range(vocab_size - _NUM_SPECIAL):
        vocab[space + _word(number)] = _NUM_SPECIAL + number
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(BOS_ID, "<s>"), _special(EOS_ID, "</s>")],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS_ID], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }


def _special(token_id: int, content: str) -> dict[str, object]:
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def _word(number: int) -> str:
    """Numbers from 0 on as words of two or more letters: aa, ab, ... zz, baa, bab, ..."""
    letters = ""
    while number or len(letters) < 2:
        number, letter = divmod(number, 26)
        letters = chr(ord("a") + letter) + letters
    return letters


def _byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte.

    Bytes that are printable in Latin-1 stand for themselves; the others take the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
