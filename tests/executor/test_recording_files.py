"""Files of recordings, where their disk is slow and their processes die."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor_svc.recording import files as files_module
from executor_svc.recording.files import RecordingFiles
from paged.v1 import recording_pb2


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordingFiles:
    """They may follow each other at once."""
    monkeypatch.setattr(files_module, "MIN_PAUSE_S", 0.0)
    return RecordingFiles(tmp_path, max_files=8, with_ids=False)


def header() -> recording_pb2.RecordingEntry:
    return recording_pb2.RecordingEntry(header=recording_pb2.RecordingHeader(reason="a test"))


def test_one_file_is_written_at_a_time_and_waited_for_no_longer_than_it_may(
    files: RecordingFiles, tmp_path: Path
) -> None:
    """Else each fault would leave another thread behind where a disk hangs."""
    goes_on = threading.Event()

    def slowly() -> Iterator[recording_pb2.RecordingEntry]:
        goes_on.wait()
        yield header()

    files.write(slowly(), wait=False)
    for _ in range(3):
        files.write([header()], wait=False)
    files.finish(0.05)
    assert list(tmp_path.glob("recording-*")) == []
    goes_on.set()
    files.finish(60)
    assert len(list(tmp_path.glob("recording-*"))) == 1
    files.write([header()], wait=True)
    assert len(list(tmp_path.glob("recording-*"))) == 2


def test_what_a_process_has_left_unfinished_is_cleared_away_when_it_is_old(
    files: RecordingFiles, tmp_path: Path
) -> None:
    old, new = tmp_path / ".recording.old", tmp_path / ".recording.new"
    for path in (old, new):
        path.write_bytes(b"half of it")
    os.utime(old, times=(time.time() - 4000,) * 2)
    files.write([header()], wait=True)
    assert (old.exists(), new.exists()) == (False, True)
