"""Tokenizer bundles on disk, by their SHA-256, so that a restarted scheduler need not fetch them again."""

import hashlib
import os
import re
import tempfile
import time
from pathlib import Path

from scheduler_svc.text.bundle import MAX_BUNDLE_BYTES, BadBundle

_HASH = re.compile(r"[0-9a-f]{64}")
_ABANDONED_AFTER_S = 3600.0


class TokenizerCache:
    """A directory of at most `max_files` bundles; the one unused for longest goes first.

    Several schedulers may share the directory: files appear whole or not at all, and are checked when read.
    """

    def __init__(self, directory: Path, max_files: int = 8) -> None:
        self._directory = directory
        self._max_files = max_files

    def get(self, tokenizer_hash: str) -> bytes | None:
        """The bundle, or None where it is not here. A damaged file counts as absent and is removed."""
        path = self._path(tokenizer_hash)
        try:
            if path.stat().st_size > MAX_BUNDLE_BYTES:
                path.unlink(missing_ok=True)
                return None
            data = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:
            return None
        if hashlib.sha256(data).hexdigest() != tokenizer_hash:
            path.unlink(missing_ok=True)
            return None
        return data

    def put(self, tokenizer_hash: str, data: bytes) -> None:
        """Keep a bundle. BadBundle if `data` is not what the hash says, OSError if the directory cannot be written."""
        path = self._path(tokenizer_hash)
        found = hashlib.sha256(data).hexdigest()
        if found != tokenizer_hash:
            raise BadBundle(f"the tokenizer's bundle has SHA-256 {found}; the executor announced {tokenizer_hash}")
        self._directory.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=self._directory, suffix=".part")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
        self._evict(keep=path)

    def _path(self, tokenizer_hash: str) -> Path:
        if not _HASH.fullmatch(tokenizer_hash):
            raise BadBundle(f"tokenizer hash {tokenizer_hash[:80]!r} is not 64 lower-case hexadecimal digits")
        return self._directory / f"{tokenizer_hash}.zip"

    def _evict(self, keep: Path) -> None:
        others = []
        for path in self._directory.iterdir():
            # Another scheduler may evict at the same time.
            try:
                modified_s = path.stat().st_mtime
            except FileNotFoundError:
                continue
            if path.suffix == ".zip" and path != keep:
                others.append((modified_s, path))
            elif path.suffix == ".part" and modified_s < time.time() - _ABANDONED_AFTER_S:
                path.unlink(missing_ok=True)
        others.sort()
        for _, path in others[: max(0, len(others) + 1 - self._max_files)]:
            path.unlink(missing_ok=True)
