"""Recordings as files: how they are written, how many are kept, and how they are read."""

import contextlib
import io
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError
from google.protobuf.proto import parse_length_prefixed, serialize_length_prefixed

from executor_svc.recording.scrub import scrubbed
from paged.v1 import recording_pb2

FORMAT_VERSION = 1
MIN_PAUSE_S = 1.0  # between two files: whatever fails again and again must not keep the disk busy
_PREFIX, _SUFFIX, _UNFINISHED = "recording-", ".paged", ".recording."
_ABANDONED_AFTER_S = 3600.0  # a file whose process has ended over it

_log = structlog.get_logger()


class RecordingFiles:
    """A directory with the `max_files` newest recordings. Without ids, none leaves the process."""

    def __init__(self, directory: Path, *, max_files: int, with_ids: bool) -> None:
        self.with_ids = with_ids
        self._directory = directory
        self._max_files = max_files
        self._last = float("-inf")
        self._writing: threading.Thread | None = None

    def write(self, entries: Iterable[recording_pb2.RecordingEntry], *, wait: bool) -> None:
        """The first entry is the header. On a thread of its own unless `wait`: schedulers are to be told of the fault
        meanwhile. Does nothing while the last file is still being written, or soon after. Never raises: what cannot be
        written is a line in the log. It may never come back from a disk that hangs."""
        now = time.monotonic()
        if now - self._last < MIN_PAUSE_S or (self._writing is not None and self._writing.is_alive()):
            return
        self._last = now
        if wait:
            self._write_and_tell(entries)
        else:
            # A process that ends does not wait for it longer than `finish` does.
            self._writing = threading.Thread(
                target=self._write_and_tell, args=(entries,), name="recording", daemon=True
            )
            self._writing.start()

    def finish(self, timeout_s: float) -> None:
        """Wait for the file that is being written, no longer than this."""
        if self._writing is not None:
            self._writing.join(timeout_s)

    def _write_and_tell(self, entries: Iterable[recording_pb2.RecordingEntry]) -> None:
        try:
            path = self._write(entries)
            num_bytes = path.stat().st_size
            self._drop_oldest()
        except OSError as error:
            _log.error("recording_not_written", directory=str(self._directory), reason=error.strerror)
        except Exception as error:  # noqa: BLE001 - of making the entries: whoever writes goes on without the file
            _log.exception("recording_not_written", directory=str(self._directory), reason=str(error))
        else:
            _log.warning("recording_written", file=str(path), bytes=num_bytes)

    def _write(self, entries: Iterable[recording_pb2.RecordingEntry]) -> Path:
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{_PREFIX}{time.time_ns()}-{os.getpid()}{_SUFFIX}"
        descriptor, name = tempfile.mkstemp(dir=self._directory, prefix=_UNFINISHED)
        try:
            with open(descriptor, "wb") as file:
                for entry in entries:
                    if entry.HasField("header"):
                        entry.header.format_version = FORMAT_VERSION
                        entry.header.has_token_ids = self.with_ids
                    buffer = io.BytesIO()
                    serialize_length_prefixed(entry if self.with_ids else scrubbed(entry), buffer)
                    file.write(buffer.getbuffer())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        return path

    def _drop_oldest(self) -> None:
        # Their names sort by time: all have as many digits until the year 2286.
        found = sorted(self._directory.glob(f"{_PREFIX}*{_SUFFIX}"))
        for path in found[: max(0, len(found) - self._max_files)]:
            path.unlink(missing_ok=True)
        for path in self._directory.glob(f"{_UNFINISHED}*"):
            with contextlib.suppress(FileNotFoundError):  # another process may be done with its own
                if path.stat().st_mtime < time.time() - _ABANDONED_AFTER_S:
                    path.unlink()


class UnreadableRecording(Exception):
    """The file is no recording, or one that is not understood here. Names it, and says why."""


def read_recording(path: Path) -> tuple[recording_pb2.RecordingHeader, Iterator[recording_pb2.RecordingEntry]]:
    """Header, and the entries behind it. Both raise UnreadableRecording."""
    entries = _entries(path)
    first = next(entries, None)
    if first is None or not first.HasField("header"):
        raise UnreadableRecording(f"{path}: does not begin with a header")
    if first.header.format_version != FORMAT_VERSION:
        found = f"is of format {first.header.format_version}"
        raise UnreadableRecording(f"{path}: {found}; only {FORMAT_VERSION} is read here")
    return first.header, itertools.chain(entries)


def _entries(path: Path) -> Iterator[recording_pb2.RecordingEntry]:
    try:
        data = io.BytesIO(path.read_bytes())  # whole: a length in a damaged file may be any
        while (entry := parse_length_prefixed(recording_pb2.RecordingEntry, data)) is not None:
            yield entry
    except OSError as error:
        raise UnreadableRecording(f"{path}: {error.strerror}") from error
    except (DecodeError, ValueError) as error:
        raise UnreadableRecording(f"{path}: is damaged: {error}") from error
