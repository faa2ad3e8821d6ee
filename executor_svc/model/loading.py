"""From a name to a model in memory: finds its directory, then loads weights and tokenizer, or says why not."""

from importlib import metadata
from pathlib import Path
from typing import Any

import structlog
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from executor_svc.model import gguf
from executor_svc.model.parallel.group import ALONE, Group
from executor_svc.model.parallel.sharding import check_shardable, finish
from executor_svc.model.refusal import ModelRefused, check_complete, reason

log = structlog.get_logger(__name__)

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_HUB_COPIES = ["*/*.safetensors", "consolidated*.safetensors"]  # the same weights once more, for other programs
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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


def find_directory(model: str, cache_dir: Path, *, trust_remote_code: bool) -> Path:
    """`model` is a directory, a .gguf file (converted first) or a hub id (downloaded first). Raises ModelRefused."""
    try:
        path = Path(model).expanduser()
        path.stat()
    except FileNotFoundError:
        pass
    except (OSError, RuntimeError, ValueError) as error:  # too long, not to be entered, the home of nobody
        raise ModelRefused(f"model {model[:100]} is not to be found: {error}") from error
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
        return Path(snapshot_download(model, allow_patterns=files, ignore_patterns=_HUB_COPIES))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        raise ModelRefused(f"model {model} is no directory here, and the hub does not give it: {error}") from error


def name_of(model: str) -> str:
    """What clients know `model` by, unless they are told another name: as `find_directory` takes it."""
    path = Path(model).expanduser()
    return (path.resolve() if path.exists() else path).name.removesuffix(".gguf")


def load_config(directory: Path, *, trust_remote_code: bool) -> PreTrainedConfig:
    """The configuration of a model that generates text. Raises ModelRefused."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            directory, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # whatever a model's own checks raise
        raise ModelRefused(f"{directory}: config.json cannot be used: {reason(error)}") from error
    names = config.architectures or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelRefused(
            f"{directory}: architectures in config.json is {str(names)[:80]}; it must be a list of names"
        )
    if (other := getattr(config, "transformers_weights", None)) is not None:
        raise ModelRefused(
            f"{directory}: transformers_weights in config.json names weights of its own ({str(other)[:80]}), which are "
            "not looked for; name them model.safetensors, and take that entry out"
        )
    if config.is_encoder_decoder:
        raise ModelRefused(f"{directory} is an encoder with a decoder ({config.model_type}); only decoders are served")
    return config


def load_model(
    directory: Path,
    config: PreTrainedConfig,
    dtype: str,
    device: torch.device,
    *,
    trust_remote_code: bool,
    group: Group = ALONE,
) -> PreTrainedModel:
    """In evaluation mode, on `device`; `dtype` as torch names it, or `auto` for the saved one. Of several ranks each
    has its share. Raises ModelRefused."""
    disable_progress_bar()  # stderr is for log lines
    spread: dict[str, Any] = {}
    if (num_ranks := group.ranks.size) > 1:
        check_shardable(directory, config, num_ranks)
        set_verbosity_error()  # it warns of each rule of a family's plan that one of its models has no use for
        spread = {"distributed_config": DistributedConfig(tp_size=num_ranks)}
    model: PreTrainedModel
    report: dict[str, set[Any]]
    try:
        model, report = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]  # a pair, with the report asked for
            directory,
            config=config,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            use_safetensors=True,  # other formats run code when they are read
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # reported, and refused below by name
            output_loading_info=True,
            **spread,
        )
    except Exception as error:  # whatever the model's own code and that of its format raise
        raise ModelRefused(f"{directory} cannot be loaded: {reason(error)}") from error
    check_complete(directory, report, model.state_dict())
    _check_architecture(directory, config, model)
    if model.dtype not in _DTYPES:
        raise ModelRefused(f"{directory} has weights of type {model.dtype}; set dtype to float32, bfloat16 or float16")
    if unexpected := sorted(report["unexpected_keys"]):
        log.warning("weights_not_used", directory=str(directory), count=len(unexpected), first=unexpected[0])
    model.to(device)  # type: ignore[arg-type]  # its signature is hidden by a wrapper
    model.eval().requires_grad_(False)
    if spread:
        finish(model)
        group.wait_for_all()
    _check_runs(directory, model)
    return model


def load_tokenizer(directory: Path, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Raises ModelRefused."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # whatever a tokenizer's own code raises
        raise ModelRefused(f"{directory} has no usable tokenizer: {reason(error)}") from error
    return tokenizer


def _check_architecture(directory: Path, config: PreTrainedConfig, model: PreTrainedModel) -> None:
    """Weights of a classifier, say, may fit a model that generates text, and would make it babble."""
    stated = config.architectures or []
    loaded = {kind.__name__ for kind in type(model).__mro__}
    if not loaded & set(stated) and (other := next((name for name in stated if hasattr(transformers, name)), None)):
        raise ModelRefused(
            f"{directory}: config.json says that the weights are those of {other}, but what generates text of "
            f"model_type {config.model_type} is {type(model).__name__}; correct architectures or model_type"
        )


def _check_runs(directory: Path, model: PreTrainedModel) -> None:
    """One token, with the model's own attention: what fails here has nothing to do with ours."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    try:
        with torch.inference_mode():
            logits: torch.Tensor = model(input_ids=token, use_cache=False).logits
    except Exception as error:
        saved = f" (saved as {model.config.dtype})" if hasattr(model.config, "quantization_config") else ""
        raise ModelRefused(
            f"{directory} does not run on {model.device} in {model.dtype}{saved}: {reason(error)}"
        ) from error
    if logits.isnan().all():
        raise ModelRefused(f"{directory} gives no finite logits in {model.dtype}: weights are broken, or out of range")
