"""Checkpoints with quantised weights: how transformers is told to load them, and which cannot be right.

Where a format has a plain form that its weights can be turned into once and for all, they are, so that a model is the
same on every device: `fp8` (in blocks), `mxfp4`, and those of `compressed-tensors` that leave activations alone. The
rest computes as transformers and the format's package do it.
"""

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from executor_svc.model.checkpoint import StoredTensor
from executor_svc.model.refusal import ModelRefused

_PACKAGES = {"compressed-tensors": "compressed_tensors", "torchao": "torchao"}
_PLAIN_TYPES = {"F64", "F32", "F16", "BF16"}


def prepare(directory: Path, config: PreTrainedConfig, stored: Mapping[str, StoredTensor]) -> None:
    """Set in `config` how its quantised weights are to be loaded. Raises ModelRefused for what cannot be served."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        _check_plain(directory, stored)
        return
    if not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    method = _method(directory, quantization)
    if method == "compressed-tensors":
        _check_schemes(directory, quantization)
        _check_packed(directory, quantization, stored)
    _check_scales(directory, stored)
    package = _PACKAGES.get(method)
    if package is not None and find_spec(package) is None:
        raise ModelRefused(
            f"{directory} was quantised by {method}, whose package is not installed: "
            "pip install 'paged-inference[quantized]'"
        )
    if method in ("fp8", "mxfp4") or (method == "compressed-tensors" and _leaves_activations(quantization)):
        quantization = {**quantization, "dequantize": True}
    config.quantization_config = quantization
    if method == "compressed-tensors":
        shared = any(_is_shared_scale(scheme.get("input_activations")) for scheme in _schemes(quantization))
    else:
        shared = method == "torchao" and _names_per_tensor_activations(quantization.get("quant_type"))
    if shared:
        raise ModelRefused(
            f"{directory} quantises activations with one scale for all tokens of a pass ({method}, per tensor, "
            "dynamic), so a sequence's text would depend on who else is served; quantise them per token"
        )


def _method(directory: Path, quantization: Mapping[str, Any]) -> str:
    method = quantization.get("quant_method")
    method = str(getattr(method, "value", method or ""))
    # Of two methods of bitsandbytes, the name says which only together with a flag.
    if method not in {name.removesuffix("_4bit").removesuffix("_8bit") for name in AUTO_QUANTIZATION_CONFIG_MAPPING}:
        known = ", ".join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))
        raise ModelRefused(
            f"{directory}: quantization_config.quant_method in config.json is {method or 'missing'}, which "
            f"transformers cannot load; it knows {known}"
        )
    return method


def _check_plain(directory: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Without a word in config.json, transformers would take quantised numbers for the weights themselves."""
    for name, tensor in stored.items():
        # Masks and the like are stored as integers; weights of experts may have any name.
        holds_weights = name.endswith((".weight", "_proj")) or tensor.dtype.startswith("F")
        if holds_weights and tensor.dtype not in _PLAIN_TYPES:
            raise ModelRefused(
                f"{directory} stores {name} as {tensor.dtype}, but config.json has no quantization_config that says "
                "how it is to be read; use a checkpoint that transformers can load"
            )


def _check_scales(directory: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Without its scale, transformers would take a weight's quantised numbers for the weight itself."""
    for name, tensor in stored.items():
        if not (tensor.dtype.startswith("F8") and name.endswith((".weight", "_proj"))):
            continue
        scales = (f"{name}_scale_inv", f"{name}_scale", f"{name.removesuffix('weight')}scale")
        if not any(scale in stored for scale in scales):
            raise ModelRefused(
                f"{directory} stores {name} as {tensor.dtype} without a scale ({scales[0]}); copy or download it again"
            )


def _check_schemes(directory: Path, quantization: Mapping[str, Any]) -> None:
    groups = quantization.get("config_groups") or {}
    schemes = list(groups.values()) if isinstance(groups, dict) else [groups]
    parts = [
        scheme.get(f"{what}_activations")
        for scheme in schemes
        if isinstance(scheme, dict)
        for what in ("input", "output")
    ]
    if not all(isinstance(scheme, dict) for scheme in schemes) or not all(
        isinstance(part, dict | None) for part in parts
    ):
        raise ModelRefused(
            f"{directory}: quantization_config.config_groups in config.json is not made of objects, so it does not say "
            "how its weights are to be read"
        )


def _check_packed(directory: Path, quantization: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> None:
    """Whole numbers lie in words of 32 bits without gaps. Read at another width, they would be others."""
    weights = [scheme.get("weights") for scheme in _schemes(quantization)]
    stated = {str(numbers.get("num_bits", 8)) for numbers in weights if isinstance(numbers, dict)}
    for name, tensor in stored.items():
        shape = stored.get(f"{name.removesuffix('packed')}shape")
        if not name.endswith(".weight_packed") or tensor.dtype != "I32" or shape is None or shape.dtype != "I64":
            continue
        num_words, num_values = (tensor.shape or (0,))[-1], (shape.read_int64s() or [0])[-1]
        widths = {str(bits) for bits in range(1, 9) if -(-num_values * bits // 32) == num_words}
        if not stated & widths:
            raise ModelRefused(
                f"{directory} stores rows of {num_values} weights in {32 * num_words} bits ({name}), but num_bits in "
                f"quantization_config.config_groups in config.json is {', '.join(sorted(stated)) or 'missing'}; "
                + (f"set it to {' or '.join(sorted(widths))}" if widths else "copy or download it again")
            )


def _schemes(quantization: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    groups = quantization.get("config_groups") or {}
    return iter(groups.values())


def _leaves_activations(quantization: Mapping[str, Any]) -> bool:
    schemes = list(_schemes(quantization))
    # With several schemes, transformers would undo all of them by the first one.
    return len(schemes) == 1 and not schemes[0].get("input_activations") and not schemes[0].get("output_activations")


def _is_shared_scale(activations: Mapping[str, Any] | None) -> bool:
    return bool(activations and activations.get("dynamic")) and (activations or {}).get("strategy") == "tensor"


def _names_per_tensor_activations(quant_type: Any) -> bool:
    """torchao spells its settings as nested objects, `_type` and `_data` each."""
    if isinstance(quant_type, dict):
        kind = str(quant_type.get("_type", ""))
        if "DynamicActivation" in kind:
            return "PerTensor" in str(quant_type)
        return any(_names_per_tensor_activations(value) for value in quant_type.values())
    return isinstance(quant_type, list) and any(_names_per_tensor_activations(value) for value in quant_type)
