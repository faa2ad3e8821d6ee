"""All that the proof of a model hangs on, as one digest. A kept proof is of use where none of it has changed."""

import hashlib
import inspect
import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

import kernels
from executor_svc.model.fused import Products
from kernels import Backend

_FORMAT = "1"  # changes with what is kept
_PACKAGES = ("torch", "transformers", "numpy", "safetensors")
# What may change how torch and its libraries compute.
_ENVIRONMENT = ("ATEN_", "DNNL_", "ONEDNN_", "MKL_", "KMP_", "OMP_", "GOMP_", "OPENBLAS_", "TORCH", "PYTORCH")
_WEIGHTS = {".safetensors", ".gguf"}
_OWN = Path(__file__).parent


def proof_key(model: PreTrainedModel, directory: Path, backend: Backend, products: Products, max_model_len: int) -> str:
    """Weights are known by their files' names, sizes and times of change; all other files by their contents. Raises
    OSError."""
    digest = hashlib.sha256(_FORMAT.encode())
    served = (backend.name, products.level, products.int8, str(model.dtype), max_model_len, torch.get_num_threads())
    parts = [*map(str, served), *_versions(), *_machine(), *_environment(), *_native_libraries()]
    for part in (*parts, *_own_code(), *_code_of(model), *_files(directory)):
        digest.update(part.encode(errors="surrogateescape") + b"\0")
    return digest.hexdigest()


def _versions() -> Iterator[str]:
    yield sys.version
    for package in _PACKAGES:
        yield f"{package} {metadata.version(package)}"
    yield torch.__config__.show()


def _machine() -> Iterator[str]:
    """What the processor is, its microcode and what it and the system let programs use."""
    yield platform.machine()
    yield torch.backends.cpu.get_cpu_capability()
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:  # not Linux
        yield platform.processor()
        return
    for line in first.splitlines():
        name = line.partition(":")[0].strip()
        if name not in ("processor", "cpu MHz", "core id", "apicid", "initial apicid", "bogomips", "physical id"):
            yield line


def _environment() -> Iterator[str]:
    for name, value in sorted(os.environ.items()):
        if name.startswith(_ENVIRONMENT):
            yield f"{name}={value}"


def _native_libraries() -> Iterator[str]:
    for path in sorted(map(Path, torch.ops.loaded_libraries)):
        yield f"{path.name} {_content(path)}"


def _own_code() -> Iterator[str]:
    for package in (_OWN, Path(kernels.__file__).parent):
        for path in sorted(package.rglob("*.py")):
            yield f"{path.relative_to(package)} {_content(path)}"


def _code_of(model: PreTrainedModel) -> Iterator[str]:
    """The files that the model's classes are from, and what of transformers they share, each as it is: a version may be
    of a copy that somebody works on."""
    shared = Path(transformers.__file__).parent
    files = {*shared.glob("*.py"), *(shared / "integrations").glob("*.py")}
    for kind in {base for module in model.modules() for base in type(module).__mro__}:
        if not kind.__module__.startswith(("torch.", "builtins")):
            files.add(Path(inspect.getfile(kind)))
    for path in sorted(files):
        yield f"{path.name} {_content(path)}"


def _files(directory: Path) -> Iterator[str]:
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory)
        if any(part.startswith(".") for part in name.parts) or not path.is_file():
            continue
        status = path.stat()
        known = f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
        yield f"{name} {known if path.suffix in _WEIGHTS else _content(path)}"


def _content(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
