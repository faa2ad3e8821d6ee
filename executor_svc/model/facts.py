"""What a scheduler must know of the model: `ModelFacts`, gathered from all places where models keep it."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog
from transformers import PreTrainedConfig, PreTrainedModel

from executor_svc.model.ready_tokenizer import TokenizerFacts
from executor_svc.model.refusal import ModelRefused
from paged.v1 import executor_pb2

log = structlog.get_logger(__name__)

_MIB = 1 << 20


def gather_facts(
    model: PreTrainedModel,
    tokenizer: TokenizerFacts,
    directory: Path,
    *,
    served_name: str,
    max_model_len: int,
    block_size: int,
    int8_weights: bool = False,
    int8_kv: bool = False,
) -> executor_pb2.ModelFacts:
    dtype = str(model.dtype).removeprefix("torch.")
    num_ids = vocab_size(model, tokenizer)
    places = [*_stated(directory, model.config), vars(model.generation_config)]
    places.append({name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")})
    bos = next((ids[0] for ids in (_ids(place, "bos_token_id", num_ids) for place in reversed(places)) if ids), None)
    return executor_pb2.ModelFacts(
        name=served_name,
        architecture=type(model).__name__,
        vocab_size=num_ids,
        max_model_len=max_model_len,
        eos_token_ids=sorted({token for place in places for token in _ids(place, "eos_token_id", num_ids)}),
        bos_token_id=bos,
        dtype=dtype,
        fingerprint=fingerprint(directory, dtype + " int8" * int8_weights + " int8_kv" * int8_kv),
        block_size=block_size,
        rope_switch_len=rope_switch_len(model.config, max_model_len),
    )


def vocab_size(model: PreTrainedModel, tokenizer: TokenizerFacts) -> int:
    """Ids that the model can read and write and the tokenizer has a text for.

    Heads are often padded to a round width, and tokenizers may have had tokens added that the model has not.
    """
    head, stated = model.get_output_embeddings(), model.config.get_text_config().vocab_size
    width = stated if head is None else getattr(head, "out_features", None) or head.weight.shape[0]
    readable = getattr(model.get_input_embeddings(), "num_embeddings", stated)
    return min(width, readable, tokenizer.num_ids)


def model_len(config: PreTrainedConfig, wanted: int | None) -> int:
    """Tokens of prompt and output together that the model can take, no more than `wanted`. Raises ModelRefused."""
    text = config.get_text_config()
    limits = {"max_position_embeddings": getattr(text, "max_position_embeddings", None)}
    for parameters in _rope_parameters(text):
        if _ends_at_original_len(parameters):
            limits["original_max_position_embeddings"] = _original_len(text, parameters)
    known = [limit for limit in limits.values() if limit]
    if not known and wanted is None:
        raise ModelRefused("the configuration names no longest sequence; set max_model_len")
    longest = min(known) if known else int(wanted or 0)
    if wanted is not None and wanted > longest:
        log.warning("max_model_len_lowered", max_model_len=longest, wanted=wanted, reason="the model's own limit")
    return min(longest, wanted or longest)


def rope_switch_len(config: PreTrainedConfig, max_model_len: int) -> int:
    """Tokens past which a sequence's keys are turned by other factors (longrope); 0 where none gets there.

    Raises ModelRefused where layers disagree.
    """
    text = config.get_text_config()
    lengths = {
        _original_len(text, parameters) or 0
        for parameters in _rope_parameters(text)
        if _rope_type(parameters) == "longrope" and not _ends_at_original_len(parameters)
    }
    if len(lengths) > 1:
        raise ModelRefused(
            f"rope_parameters: layers change their factors at different lengths ({sorted(lengths)}); "
            f"set max_model_len to {min(lengths)} or less"
        )
    length = lengths.pop() if lengths else 0
    return length if length < max_model_len else 0


def fingerprint(directory: Path, dtype: str) -> str:
    """Changes when configuration, weights, or the type in which they are served do. Of a weight file its name, size,
    first and last MiB count."""
    digest = hashlib.sha256()
    digest.update((directory / "config.json").read_bytes())
    digest.update(dtype.encode())
    for file in sorted(directory.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"\n{file.name}:{size}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_MIB))
            stream.seek(max(0, size - _MIB))
            digest.update(stream.read(_MIB))
    return digest.hexdigest()


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """One set, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def _rope_type(parameters: dict[str, Any]) -> str:
    return str(parameters.get("rope_type") or parameters.get("type") or "default")


def _original_len(config: PreTrainedConfig, parameters: dict[str, Any]) -> int | None:
    length: int | None = parameters.get("original_max_position_embeddings")
    length = length or getattr(config, "original_max_position_embeddings", None)
    return length or getattr(config, "max_position_embeddings", None)


def _ends_at_original_len(parameters: dict[str, Any]) -> bool:
    """Whether keys of longer sequences cannot be right: see `executor_svc.model.rotary`."""
    return _rope_type(parameters) == "dynamic" or "short_mscale" in parameters


def _stated(directory: Path, config: PreTrainedConfig) -> list[dict[str, Any]]:
    """What config.json says, and its part for text. A configuration object adds ids that nobody wrote down."""
    stated = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    text = config.get_text_config()
    nested = [
        value for name, value in stated.items() if isinstance(value, dict) and getattr(config, name, None) is text
    ]
    return [stated, *nested]


def _ids(place: Mapping[str, Any], name: str, num_ids: int) -> list[int]:
    """A token id setting may be an id, a list of ids, null, or missing; ids that cannot come are left out."""
    value = place.get(name)
    ids = value if isinstance(value, list | tuple) else [value]
    return [token for token in ids if type(token) is int and 0 <= token < num_ids]
