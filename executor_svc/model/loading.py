"""From a name to a model in memory: finds its directory, then loads weights and tokenizer, or says why not."""

from importlib import metadata
from pathlib import Path

import structlog
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from executor_svc.model import gguf
from executor_svc.model.refusal import ModelRefused, check_complete

log = structlog.get_logger(__name__)

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]


def refuse_foreign_kernels() -> None:
    """Transformers looks for a package of the name `kernels`, and would find ours in its place."""
    try:
        version = metadata.version("kernels")
    except metadata.PackageNotFoundError:
        return
    raise ModelRefused(
        f"the package kernels {version} is installed, whose name is that of a package of Paged; "
        "transformers would mistake one for the other: pip uninstall kernels"
    )


def choose_device(name: str) -> torch.device:
    """`auto`, `cpu` or `cuda`. Raises ModelRefused."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelRefused("device is cuda, but torch finds none; set device to cpu, or install torch for CUDA")
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def find_directory(model: str, cache_dir: Path, *, trust_remote_code: bool) -> Path:
    """`model` is a directory, a .gguf file (converted first) or a hub id (downloaded first). Raises ModelRefused."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelRefused(f"model {model} is a file, but not a .gguf one; name its directory")
        return gguf.converted(path, cache_dir)
    if path.is_absolute() or model.startswith(".") or model.endswith(".gguf"):
        raise ModelRefused(f"model {model} does not exist; name a directory, a .gguf file or a hub id")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    files = [*_HUB_FILES, "*.py"] if trust_remote_code else _HUB_FILES
    try:
        return Path(snapshot_download(model, allow_patterns=files))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise ModelRefused(f"model {model} is no directory here, and the hub does not give it: {error}") from error


def load_model(directory: Path, dtype: str, device: torch.device, *, trust_remote_code: bool) -> PreTrainedModel:
    """In evaluation mode, on `device`; `dtype` as torch names it, or `auto` for the saved one. Raises ModelRefused."""
    disable_progress_bar()  # stderr is for log lines
    model: PreTrainedModel
    report: dict[str, set[str]]
    try:
        model, report = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]  # a pair, with the report asked for
            directory,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            use_safetensors=True,  # other formats run code when they are read
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError) as error:
        raise ModelRefused(f"{directory} cannot be loaded: {type(error).__name__}: {error}") from error
    check_complete(directory, report)
    if unexpected := sorted(report["unexpected_keys"]):
        log.warning("weights_not_used", directory=str(directory), count=len(unexpected), first=unexpected[0])
    model.to(device)  # type: ignore[arg-type]  # its signature is hidden by a wrapper
    return model.eval().requires_grad_(False)


def load_tokenizer(directory: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Raises ModelRefused."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError) as error:
        raise ModelRefused(f"{directory} has no usable tokenizer: {type(error).__name__}: {error}") from error
    return tokenizer
