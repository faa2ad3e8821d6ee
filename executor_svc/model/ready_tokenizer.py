"""What an executor needs of a tokenizer, kept on disk: building a large one takes longer than loading a small model.

It is found again by the contents of all files it may have been made of and the versions of all code that may have
made it, so what is found is what would be made.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import structlog

from executor_svc.model import loading
from executor_svc.model.bundle import make_bundle

log = structlog.get_logger(__name__)

MAX_KEPT = 8  # files; the one unused for longest goes first
_WORTH_KEEPING_BYTES = 1 << 18  # of a bundle; smaller ones are made in no time
_FORMAT = "1"  # changes with what is kept, and with how a bundle is made
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
_MAKERS = ("transformers", "tokenizers", "sentencepiece", "tiktoken", "protobuf", "mistral-common", "jinja2")
_SUFFIX = ".tokenizer"


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What a scheduler is told beside the bundle. `num_ids` is the highest id that has a text, plus 1."""

    num_ids: int
    bos_token_id: int | None
    eos_token_id: int | None


@dataclass(frozen=True, slots=True)
class ReadyTokenizer:
    """`bundle` as `executor_svc.model.bundle` makes it."""

    facts: TokenizerFacts
    bundle: bytes


def load_ready(directory: Path, cache_dir: Path, *, trust_remote_code: bool) -> ReadyTokenizer:
    """Raises ModelRefused where the directory has no tokenizer that can be served."""
    if trust_remote_code:  # it may read whatever it likes
        return make_ready(directory, trust_remote_code=True)
    path = cache_dir.expanduser() / "ready-tokenizers" / (_key(directory) + _SUFFIX)
    kept = _read(path)
    if kept is not None:
        return kept
    made = make_ready(directory, trust_remote_code=False)
    if len(made.bundle) < _WORTH_KEEPING_BYTES:
        return made
    try:
        _keep(path, made)
    except OSError as error:
        log.warning("tokenizer_not_kept", path=str(path), reason=error.strerror)
    return made


def make_ready(directory: Path, *, trust_remote_code: bool) -> ReadyTokenizer:
    """Raises ModelRefused, as `load_ready`."""
    tokenizer = loading.load_tokenizer(directory, trust_remote_code=trust_remote_code)
    num_ids = max(tokenizer.get_vocab().values(), default=-1) + 1
    facts = TokenizerFacts(num_ids, tokenizer.bos_token_id, tokenizer.eos_token_id)
    return ReadyTokenizer(facts, make_bundle(directory, tokenizer))


def _key(directory: Path) -> str:
    digest = hashlib.sha256(_FORMAT.encode())
    for package in _MAKERS:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            version = "not installed"
        digest.update(f"\0{package} {version}".encode())
    for name in sorted(_names(directory)):
        with (directory / name).open("rb") as stream:
            content = hashlib.file_digest(stream, "sha256").hexdigest()
        digest.update(f"\0{name} {content}".encode())
    return digest.hexdigest()


def _names(directory: Path) -> Iterator[str]:
    """Of files that it may be made of. Hidden ones are not among them: a clone has all weights there once more."""
    for path in directory.rglob("*"):
        name = path.relative_to(directory)
        if path.suffix not in _WEIGHTS and not any(part.startswith(".") for part in name.parts) and path.is_file():
            yield name.as_posix()


def _read(path: Path) -> ReadyTokenizer | None:
    """None where there is none, or where it is damaged."""
    try:
        first, _, bundle = path.read_bytes().partition(b"\n")
        stated = json.loads(first)
        if hashlib.sha256(bundle).hexdigest() != stated.pop("sha256"):
            return None
        kept = ReadyTokenizer(TokenizerFacts(**stated), bundle)
        os.utime(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return kept


def _keep(path: Path, ready: ReadyTokenizer) -> None:
    """Raises OSError. Others may read, write and drop at the same time; they find a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stated = asdict(ready.facts) | {"sha256": hashlib.sha256(ready.bundle).hexdigest()}
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with open(descriptor, "wb") as file:
            file.write(json.dumps(stated).encode() + b"\n" + ready.bundle)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
    _drop_unused(path.parent, but=path)


def _drop_unused(directory: Path, *, but: Path) -> None:
    others = []
    for other in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            others.append((other.stat().st_mtime, other))
    for _, other in sorted(others)[:-MAX_KEPT]:
        if other != but:
            other.unlink(missing_ok=True)
