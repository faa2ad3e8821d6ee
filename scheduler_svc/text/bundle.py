"""The tokenizer's bundle: what the executor sends, opened with care.

A bundle is a flat zip of tokenizer.json, tokenizer_config.json, config.json, generation_config.json,
special_tokens_map.json, chat_template.json and templates in files of their own. It comes from another process, so
nothing in it is trusted: not its number of entries, not the sizes it states, not its JSON.
"""

import io
import json
import zipfile
import zlib
from typing import Any

from scheduler_svc.errors import PagedError

MAX_BUNDLE_BYTES = 128 << 20
MAX_ENTRIES = 64
MAX_UNPACKED_BYTES = 256 << 20
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class BadBundle(PagedError):
    """The executor's tokenizer cannot be used; the message says why."""


class Bundle:
    """The unpacked files of a bundle by name; made by `open_bundle`."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files

    def take(self, name: str) -> bytes:
        """The file's bytes, which the bundle forgets: the largest are tens of megabytes. BadBundle if missing."""
        try:
            return self._files.pop(name)
        except KeyError:
            raise BadBundle(f"the tokenizer's bundle lacks {name}; it holds {sorted(self._files)}") from None

    def text(self, name: str) -> str | None:
        """The file as UTF-8 text, None where there is none."""
        data = self._files.get(name)
        if data is None:
            return None
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadBundle(f"{name} of the tokenizer's bundle is not UTF-8: {error}") from error

    def json_object(self, name: str) -> dict[str, Any]:
        """The file as a JSON object, empty where there is none."""
        text = self.text(name)
        if text is None:
            return {}
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadBundle(f"{name} of the tokenizer's bundle is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise BadBundle(f"{name} of the tokenizer's bundle is a JSON {type(value).__name__}, not an object")
        return value


def open_bundle(data: bytes) -> Bundle:
    """Unpack a bundle of at most MAX_BUNDLE_BYTES, MAX_ENTRIES files and MAX_UNPACKED_BYTES; else BadBundle."""
    if len(data) > MAX_BUNDLE_BYTES:
        raise BadBundle(f"the tokenizer's bundle has {len(data)} bytes; the limit is {MAX_BUNDLE_BYTES}")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return Bundle({entry.filename: _unpack(archive, entry) for entry in _checked_entries(archive)})
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, UnicodeDecodeError) as error:
        raise BadBundle(f"the tokenizer's bundle is not a sound zip: {error}") from error


def _checked_entries(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    entries = [entry for entry in archive.infolist() if not entry.is_dir()]
    if len(entries) > MAX_ENTRIES:
        raise BadBundle(f"the tokenizer's bundle has {len(entries)} files; the limit is {MAX_ENTRIES}")
    stated = sum(entry.file_size for entry in entries)
    if stated > MAX_UNPACKED_BYTES:
        raise BadBundle(f"the tokenizer's bundle unpacks to {stated} bytes; the limit is {MAX_UNPACKED_BYTES}")
    names = {entry.filename for entry in entries}
    if len(names) < len(entries):
        raise BadBundle("the tokenizer's bundle has two files of one name")
    for entry in entries:
        if entry.compress_type not in _METHODS:
            raise BadBundle(f"{entry.filename} of the tokenizer's bundle is neither stored nor deflated")
    return entries


def _unpack(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    # A bounded read: without a size, zipfile would inflate all there is before it looks at the size stated.
    with archive.open(entry) as file:
        data = file.read(entry.file_size)
        if len(data) < entry.file_size:
            raise BadBundle(f"{entry.filename} of the tokenizer's bundle does not have the size it states")
    return data
