"""GGUF files, made once into a directory as transformers saves it: safetensors, configuration, tokenizer.

Weights that are quantised in the file come out as bfloat16, which rounds far finer than any of the quantisations.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import structlog

from executor_svc.model.gguf_losses import check_losses
from executor_svc.model.refusal import ModelRefused, check_complete, reason

log = structlog.get_logger(__name__)

CONVERSION = 3  # raise it when a conversion comes out differently, so that older ones are not taken for it
_CONTROL, _USER_DEFINED = 3, 4  # types of tokens
_PLAIN_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def converted(gguf_file: Path, cache_dir: Path) -> Path:
    """The directory made from `gguf_file`: made now, or found where an earlier call left it. Raises ModelRefused.

    Found again by the file's place, size and time of change.
    """
    stat = gguf_file.stat()
    identity = f"{gguf_file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{CONVERSION}"
    name = f"{gguf_file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    return made_once(cache_dir.expanduser() / name, lambda directory: convert(gguf_file, directory))


def made_once(directory: Path, make: Callable[[Path], None]) -> Path:
    """`directory`, filled by `make(an empty directory)` unless it is there. Nobody ever sees it half made.

    Several processes may ask at once: one makes it and the others wait.
    """
    if directory.exists():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.with_name(directory.name + ".lock")):
        if directory.exists():
            return directory
        making = Path(tempfile.mkdtemp(prefix=directory.name + ".", suffix=".part", dir=directory.parent))
        try:
            make(making)
            making.chmod(0o755)
            for file in making.iterdir():
                file.chmod(0o644)
            making.rename(directory)
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return directory


def convert(gguf_file: Path, directory: Path) -> None:
    """Write model and tokenizer of `gguf_file` to `directory`. Raises ModelRefused."""
    # Here and not above: who finds a directory made does not wait for these.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    log.info("gguf_conversion_started", file=str(gguf_file), directory=str(directory))
    place = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    loaded: Any  # a model and a report; the signature knows the model alone
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            **place,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
        model, report = loaded
        check_complete(gguf_file, report, model.state_dict())
        tokenizer = AutoTokenizer.from_pretrained(**place)
        reader, config = _reader(gguf_file), model.config
        check_losses(gguf_file, reader, config, tokenizer)
    except ModelRefused:
        raise
    except Exception as error:  # whatever readers of broken files raise
        raise ModelRefused(f"{gguf_file} cannot be converted: {reason(error)}") from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # it speaks of the file, whose weights are plain ones now
    # The loaded object remembers that it was quantised and would refuse to be saved; a fresh one of its kind does not.
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), strict=True, assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    plain.generation_config.eos_token_id = _end_tokens(reader) or model.generation_config.eos_token_id
    plain.to(getattr(torch, _dtype(reader))).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    _add_whole_tokens(reader, directory / "tokenizer.json")
    log.info("gguf_conversion_done", directory=str(directory))


def _reader(gguf_file: Path) -> Any:
    from gguf import GGUFReader

    return GGUFReader(gguf_file)


def _dtype(reader: Any) -> str:
    """The type of the file's matrices where it is a plain one; routers of experts are F32 beside any type."""
    types = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
    narrower = types - {"F32"} or types
    return _PLAIN_DTYPES.get(narrower.pop(), "bfloat16") if len(narrower) == 1 else "bfloat16"


def _add_whole_tokens(reader: Any, file: Path) -> None:
    """Write tokens that no text is ever cut within to tokenizer.json, as far as they are lost.

    Transformers spells those that are not written in the letters of a byte-level vocabulary as bytes, and a text that
    has them is cut into pieces: `<｜User｜>`, say.
    """
    model, *fields = (reader.fields.get(f"tokenizer.ggml.{name}") for name in ("model", "tokens", "token_type"))
    if model is None or model.contents() != "gpt2" or None in fields:
        return
    state = json.loads(file.read_text(encoding="utf-8"))
    vocab = state["model"]["vocab"]
    known = {token["content"] for token in state["added_tokens"]}
    spelled = {token_id: text for text, token_id in vocab.items()}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for token_id, (text, kind) in enumerate(zip(*(field.contents() for field in fields), strict=True)):
        if kind in (_CONTROL, _USER_DEFINED) and text not in known and token_id in spelled:
            del vocab[spelled[token_id]]
            vocab[text] = token_id
            state["added_tokens"].append({"id": token_id, "content": text, "special": kind == _CONTROL, **flags})
    state["added_tokens"].sort(key=lambda token: token["id"])
    file.write_text(json.dumps(state, ensure_ascii=False), encoding="utf-8")


def _end_tokens(reader: Any) -> list[int]:
    """A file has an entry for each kind of end: of the text, of a turn, of a message. Transformers reads the first."""
    names = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
    return sorted({int(reader.fields[name].contents()) for name in names if name in reader.fields})


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of that file; the system releases it when its holder dies."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
