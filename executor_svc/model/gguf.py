"""GGUF files, made once into a directory as transformers saves it: safetensors, configuration, tokenizer.

Weights that are quantised in the file come out as bfloat16, which rounds far finer than any of the quantisations.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import structlog

from executor_svc.model.refusal import ModelRefused, check_complete, reason

log = structlog.get_logger(__name__)

CONVERSION = 1  # raise it when a conversion comes out differently, so that older ones are not taken for it
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
    except ModelRefused:
        raise
    except Exception as error:  # whatever readers of broken files raise
        raise ModelRefused(f"{gguf_file} cannot be converted: {reason(error)}") from error
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # it speaks of the file, whose weights are plain ones now
    # The loaded object remembers that it was quantised and would refuse to be saved; a fresh one of its kind does not.
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), strict=True, assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    plain.to(getattr(torch, _dtype(gguf_file))).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    log.info("gguf_conversion_done", directory=str(directory))


def _dtype(gguf_file: Path) -> str:
    """The type of the file's matrices where it is a plain one."""
    from gguf import GGUFReader

    types = {tensor.tensor_type.name for tensor in GGUFReader(gguf_file).tensors if len(tensor.shape) > 1}
    return _PLAIN_DTYPES.get(types.pop(), "bfloat16") if len(types) == 1 else "bfloat16"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of that file; the system releases it when its holder dies."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
