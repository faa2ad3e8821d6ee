"""Files are read again when they change, and bad ones change nothing."""

import os
from pathlib import Path

import pytest

from paged.followed import LOOK_S, Followed

LONG_AGO_NS = 10**18


class Files:
    """A clock and what was told."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = 0.0
        self.failures: list[str] = []
        self.changes: list[str] = []

    def follow(self) -> Followed[str]:
        return Followed(
            [self.path],
            self.load,
            lambda error: self.failures.append(str(error)),
            on_change=self.changes.append,
            clock=lambda: self.now,
        )

    def load(self) -> str:
        files = sorted(self.path.iterdir()) if self.path.is_dir() else [self.path]
        text = "".join(file.read_text() for file in files)
        if "bad" in text:
            raise ValueError(text)
        return text

    def write(self, text: str, *, age: int = 0, name: str = "") -> None:
        """`age` makes equal sizes tell apart, as older files are."""
        file = self.path / name if name else self.path
        file.write_text(text)
        os.utime(file, ns=(LONG_AGO_NS + age, LONG_AGO_NS + age))

    def later(self) -> None:
        self.now += LOOK_S


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "file")


def test_a_change_is_seen_at_the_next_look_and_told_once(files: Files) -> None:
    files.write("a")
    followed = files.follow()
    files.write("b", age=1)
    assert followed.current == "a"
    files.later()
    assert [followed.current, followed.current] == ["b", "b"]
    files.later()
    assert followed.current == "b"
    assert files.changes == ["b"]


def test_what_cannot_be_used_is_told_once_and_changes_nothing(files: Files) -> None:
    files.write("a")
    followed = files.follow()
    for age, text in enumerate(("bad", "bad 2"), 1):
        files.write(text, age=age)
        for _ in range(3):
            files.later()
            assert followed.current == "a"
    files.path.unlink()
    files.later()
    assert followed.current == "a"
    assert files.failures[:2] == ["bad", "bad 2"]
    assert len(files.failures) == 3
    files.write("b", age=9)
    files.later()
    assert followed.current == "b"


def test_at_first_it_is_raised(files: Files) -> None:
    with pytest.raises(FileNotFoundError):
        files.follow()
    files.write("bad")
    with pytest.raises(ValueError, match="bad"):
        files.follow()


def test_a_file_written_a_moment_ago_is_read_again_although_it_looks_the_same(files: Files) -> None:
    files.path.write_text("a")
    followed = files.follow()
    before = files.path.stat()
    files.path.write_text("b")
    os.utime(files.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    files.later()
    assert followed.current == "b"


def test_a_directory_is_its_files(files: Files) -> None:
    files.path.mkdir()
    files.write("a", name="1")
    os.utime(files.path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    followed = files.follow()
    files.write("b", name="2")
    files.later()
    assert followed.current == "ab"
    files.write("c", age=5, name="1")
    files.later()
    assert followed.current == "cb"
    (files.path / "2").unlink()
    files.later()
    assert followed.current == "c"
