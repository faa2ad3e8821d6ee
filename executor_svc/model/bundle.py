"""The tokenizer's bundle: all that a scheduler needs of a model, as one zip that is the same whenever it is made."""

import io
import zipfile
from pathlib import Path

import tokenizers
from transformers import PreTrainedTokenizerBase

from executor_svc.model.refusal import ModelRefused, reason

_NAMES = (
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.json",
)
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip can hold


def make_bundle(directory: Path, tokenizer: PreTrainedTokenizerBase) -> bytes:
    """Raises ModelRefused where the tokenizer has no fast form, which alone is a single file, or no sound one."""
    if not isinstance(tokenizer.chat_template, str | dict | None):
        raise ModelRefused(
            f"{directory}: chat_template in tokenizer_config.json is {tokenizer.chat_template}, not a text"
        )
    files = {name: (directory / name).read_bytes() for name in _NAMES if (directory / name).is_file()}
    files |= {
        template.relative_to(directory).as_posix(): template.read_bytes()
        for pattern in ("*.jinja", "additional_chat_templates/*.jinja")
        for template in directory.glob(pattern)
    }
    files["tokenizer.json"] = _tokenizer_json(directory, tokenizer)
    try:
        tokenizers.Tokenizer.from_buffer(files["tokenizer.json"])
    except ValueError as error:
        raise ModelRefused(f"{directory}: the tokenizer cannot be read back: {reason(error)}") from error
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in sorted(files.items()):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3  # as on Unix, wherever it is made
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content, compresslevel=6)
    return buffer.getvalue()


def _tokenizer_json(directory: Path, tokenizer: PreTrainedTokenizerBase) -> bytes:
    """The tokenizer as transformers has built it. That need not be what the directory's tokenizer.json says: its class,
    as tokenizer_config.json names it, has a say in how texts are taken apart and what is put at their ends."""
    if tokenizer.is_fast:
        text: str = tokenizer.backend_tokenizer.to_str()
        return text.encode()
    file = directory / "tokenizer.json"
    if file.is_file():
        return file.read_bytes()
    raise ModelRefused(
        f"{directory} has no tokenizer.json, and {type(tokenizer).__name__} cannot be made into one; "
        "save the model with its fast tokenizer"
    )
