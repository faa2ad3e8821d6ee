"""A bundle from another process is opened with care, and kept by its hash."""

import hashlib
import io
import json
import os
import struct
import zipfile
from pathlib import Path

import pytest

from scheduler_svc.text import bundle as bundle_module
from scheduler_svc.text.bundle import MAX_ENTRIES, BadBundle, open_bundle
from scheduler_svc.text.bundle_cache import TokenizerCache
from scheduler_svc.text.tokenizer import Tokenizer
from tests.text.models import KINDS, bundle_of


def zipped(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def test_files_come_out_as_they_went_in() -> None:
    bundle = open_bundle(zipped({"config.json": b'{"a": 1}', "x.jinja": b"hi"}))
    assert bundle.json_object("config.json") == {"a": 1}
    assert bundle.text("x.jinja") == "hi"
    assert bundle.text("y.jinja") is None
    assert bundle.json_object("generation_config.json") == {}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "sound zip"),
        (b"PK\x03\x04 not really", "sound zip"),
        (zipped({"a": b"x" * 1000})[:-40], "sound zip"),
        (zipped({f"{i}": b"" for i in range(MAX_ENTRIES + 1)}), "files; the limit is"),
        (zipped({"a": b"x"}, zipfile.ZIP_LZMA), "neither stored nor deflated"),
    ],
    ids=["empty", "nonsense", "cut off", "too many files", "another compression"],
)
def test_what_is_not_a_small_sound_zip_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(BadBundle, match=reason):
        open_bundle(data)


def test_a_flipped_bit_is_noticed() -> None:
    data = bytearray(zipped({"config.json": os.urandom(500)}, zipfile.ZIP_STORED))
    data[100] ^= 1
    with pytest.raises(BadBundle, match="sound zip"):
        open_bundle(bytes(data))


def test_a_zip_bomb_is_refused_before_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_module, "MAX_UNPACKED_BYTES", 1 << 20)
    with pytest.raises(BadBundle, match="unpacks to"):
        open_bundle(zipped({"tokenizer.json": b"\0" * (2 << 20)}))


def test_a_file_larger_than_it_states_is_refused() -> None:
    data = zipped({"tokenizer.json": b"\0" * (8 << 20)})
    size = struct.pack("<I", 8 << 20)
    assert data.count(size) == 2
    with pytest.raises(BadBundle, match=r"size it states|sound zip"):
        open_bundle(data.replace(size, struct.pack("<I", 100)))


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "lacks tokenizer.json"),
        ({"tokenizer.json": b"{}"}, "cannot be loaded"),
        ({"tokenizer.json": b"\xff"}, "cannot be loaded"),
    ],
)
def test_a_bundle_without_a_usable_tokenizer_is_refused(files: dict[str, bytes], reason: str) -> None:
    with pytest.raises(BadBundle, match=reason):
        Tokenizer.from_bundle(zipped(files))


def test_a_tokenizer_over_which_the_library_panics_is_refused() -> None:
    """Rust's panics are no `Exception` in Python."""
    model = {"type": "BPE", "continuing_subword_prefix": "##", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}
    with pytest.raises(BadBundle, match="LibraryPanic: slice index"):
        Tokenizer.from_bundle(zipped({"tokenizer.json": json.dumps({"model": model}).encode()}))


@pytest.mark.parametrize("config", [b"[]", b"\xff", b"{", b"[" * 100_000])
def test_a_broken_configuration_is_refused(config: bytes) -> None:
    with pytest.raises(BadBundle, match=r"tokenizer_config\.json"):
        Tokenizer.from_bundle(bundle_of(KINDS["byte_level"], {"tokenizer_config.json": config}))


@pytest.mark.parametrize(
    "config",
    [
        b'{"added_tokens_decoder": [1]}',
        b'{"added_tokens_decoder": {"1": {}}}',
        b'{"added_tokens_decoder": {"x": {"content": "a"}}}',
        b'{"bos_token": "\\ud800"}',
    ],
)
def test_a_configuration_of_another_shape_is_refused(config: bytes) -> None:
    """Whatever it is: what an executor sends must not end a scheduler."""
    with pytest.raises(BadBundle, match="cannot be used"):
        Tokenizer.from_bundle(bundle_of(KINDS["byte_level"], {"tokenizer_config.json": config}))


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_a_bundle_is_found_again_by_its_hash(tmp_path: Path) -> None:
    cache = TokenizerCache(tmp_path / "not" / "there" / "yet")
    assert cache.get(hash_of(b"data")) is None
    cache.put(hash_of(b"data"), b"data")
    assert cache.get(hash_of(b"data")) == b"data"
    assert TokenizerCache(tmp_path / "not" / "there" / "yet").get(hash_of(b"data")) == b"data"


def test_data_of_another_hash_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(BadBundle, match="SHA-256"):
        TokenizerCache(tmp_path).put(hash_of(b"data"), b"other")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_counts_as_absent(tmp_path: Path) -> None:
    cache = TokenizerCache(tmp_path)
    cache.put(hash_of(b"data"), b"data")
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"dat")
    assert cache.get(hash_of(b"data")) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "..", "../../etc/passwd", "A" * 64, "a" * 63, "a" * 64 + "\n"])
def test_only_a_hash_names_a_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadBundle, match="hexadecimal"):
        TokenizerCache(tmp_path).get(name)


def test_the_bundle_unused_for_longest_goes_first(tmp_path: Path) -> None:
    cache = TokenizerCache(tmp_path, max_files=3)
    for i, data in enumerate([b"0", b"1", b"2"]):
        cache.put(hash_of(data), data)
        os.utime(tmp_path / f"{hash_of(data)}.zip", (i, i))
    assert cache.get(hash_of(b"0")) == b"0"
    cache.put(hash_of(b"3"), b"3")
    kept = [data for data in (b"0", b"1", b"2", b"3") if cache.get(hash_of(data)) is not None]
    assert kept == [b"0", b"2", b"3"]


def test_abandoned_writes_are_cleared_away(tmp_path: Path) -> None:
    abandoned, recent = tmp_path / "old.part", tmp_path / "new.part"
    abandoned.write_bytes(b"half")
    recent.write_bytes(b"half")
    os.utime(abandoned, (1, 1))
    TokenizerCache(tmp_path).put(hash_of(b"data"), b"data")
    assert not abandoned.exists()
    assert recent.exists()
