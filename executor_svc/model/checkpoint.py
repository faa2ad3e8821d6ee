"""What is in a model's directory, checked before anything is loaded: settings that can be read, and weight files that
are whole. From the weight files only their headers are read."""

import json
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor_svc.model.refusal import ModelRefused

_SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
)
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Type as safetensors spells it: `BF16`, `F8_E4M3`, ... Its bytes are at `begin` of `file`."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    file: Path
    begin: int

    def read_int64s(self) -> list[int]:
        """The values of a small tensor of type I64."""
        with self.file.open("rb") as stream:
            stream.seek(self.begin)
            data = stream.read(self.num_bytes)
        return [int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, len(data), 8)]


def check_directory(directory: Path) -> dict[str, StoredTensor]:
    """All stored weights by name. Raises ModelRefused."""
    if (directory / "adapter_config.json").exists():
        raise ModelRefused(
            f"{directory} holds an adapter (adapter_config.json), which would not be applied; "
            "merge it into its base model and name the merged one, or remove that file"
        )
    if not (directory / "config.json").is_file():
        inside = next(iter(sorted(directory.glob("*.gguf"))), None)
        hint = f"name the file: {inside}" if inside else "name a directory that a model was saved to"
        raise ModelRefused(f"{directory} has no config.json; {hint}")
    for name in _SETTINGS:
        if (directory / name).exists():
            _read_object(directory / name)
    stored: dict[str, StoredTensor] = {}
    for file in _weight_files(directory):
        stored |= _read_header(file)
    return stored


def _weight_files(directory: Path) -> Iterator[Path]:
    """One file, or else those that the index names."""
    if (directory / _SINGLE).exists():
        yield directory / _SINGLE
        return
    index = directory / _INDEX
    if not index.exists():
        other = next((file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern)), None)
        found = f"; {other} is of a kind that runs code when it is read" if other else ""
        raise ModelRefused(f"{directory} has neither {_SINGLE} nor {_INDEX}{found}; save the model as safetensors")
    names = _read_object(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ModelRefused(f"{index} has no weight_map of names to files; save the model again")
    for name in sorted(set(names.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelRefused(f"{index} names {name}, which is no .safetensors file of that directory")
        if not (directory / name).exists():
            raise ModelRefused(f"{directory} lacks {name}, which {_INDEX} names; copy or download that file again")
        yield directory / name


def _read_header(file: Path) -> dict[str, StoredTensor]:
    """A header of JSON behind its length in 8 bytes; then the tensors, which end where the file does."""
    broken = f"{file} is cut short or is no safetensors file; copy or download it again"
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise ModelRefused(broken)
            text = stream.read(length)
    except OSError as error:
        raise ModelRefused(f"{file} cannot be read: {error.strerror}") from error
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        tensors = {name: _stored(entry, file, 8 + length) for name, entry in header.items()}
        end = max((tensor.begin + tensor.num_bytes for tensor in tensors.values()), default=8 + length)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ModelRefused(broken) from error
    if end != size:
        raise ModelRefused(f"{file} has {size} bytes where its header names {end}; copy it again")
    return tensors


def _stored(entry: Mapping[str, Any], file: Path, begin: int) -> StoredTensor:
    """An entry of the header of `file`, whose tensors begin at `begin`."""
    first, end = map(operator.index, entry["data_offsets"])
    return StoredTensor(entry["dtype"], tuple(map(operator.index, entry["shape"])), end - first, file, begin + first)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelRefused(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelRefused(f"{file} holds a {type(content).__name__} where an object belongs")
    return content
