"""Tiny checkpoints of each quantised format, and what becomes of them: the support table is made of this list.

Each is made here by the format's own package where it has a way to on a CPU, and by hand from its definition where it
has none.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tests.tiny_models import TINY_DECODER, VOCAB_SIZE, save_tokenizer

GROUP = 32


Model = transformers.PreTrainedModel


@dataclass(frozen=True)
class Checkpoint:
    """A row of the support table. `margin_nats` is what the margin rule allows in fp32; None where it is refused.

    `make` fills a directory and returns a plain model with the weights that the quantised ones stand for, or None where
    transformers' own forward pass of that directory is what to compare with.
    """

    format: str
    scheme: str
    make: Callable[[Path], Model | None]
    margin_nats: float | None
    note: str
    refusal: str = ""  # what the refusal says

    @property
    def name(self) -> str:
        return f"{self.format}: {self.scheme}"


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def tiny_llama() -> Model:
    torch.manual_seed(0)
    return plain_model(transformers.LlamaConfig(**TINY_DECODER))


def plain_model(config: transformers.PreTrainedConfig) -> Model:
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def with_weights(model: Model, weights: dict[str, torch.Tensor]) -> Model:
    """The model with some of its weights replaced."""
    unknown = model.load_state_dict(weights, strict=False).unexpected_keys
    assert not unknown
    return model


# compressed-tensors


def make_compressed(
    directory: Path, *, preset: str, dynamic_tensor: bool = False, head: bool = False, kv: bool = False
) -> Model | None:
    """As its own tools do it: each weight's scales from its extremes, activations' from a guess or in each pass."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )

    scheme = preset_name_to_scheme(preset, ["Linear"])
    for arguments in (scheme.weights, scheme.input_activations):
        if arguments is not None and arguments.group_size == 128:
            arguments.group_size = GROUP
        if arguments is not None and arguments.block_structure:
            arguments.block_structure = [GROUP, GROUP]
    if dynamic_tensor:
        scheme.input_activations.strategy = "tensor"
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=[] if head else ["lm_head"])
    if kv:
        config.kv_cache_scheme = QuantizationArgs(num_bits=8, type="float", strategy="tensor", dynamic=False)
    model = tiny_llama()
    apply_quantization_config(model, config, show_progress=False)
    weights = {}
    for name, module in model.named_modules():
        if getattr(module, "quantization_scheme", None) is not None:
            weights[f"{name}.weight"] = set_scales(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(directory)
    compressor.update_config(str(directory))
    save_tokenizer(directory)
    return None if scheme.input_activations else with_weights(tiny_llama(), weights)


def set_scales(module: Any) -> torch.Tensor:
    """Returns what the quantised weight stands for."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weights, activations = module.quantization_scheme.weights, module.quantization_scheme.input_activations
    low, high = extremes(module.weight.detach(), weights)
    options = {}
    if hasattr(module, "weight_global_scale"):
        module.weight_global_scale.data.copy_(generate_gparam(low.min(), high.max()))
        options["global_scale"] = module.weight_global_scale
    scale, zero_point = calculate_qparams(low, high, weights, **options)
    module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zero_point.reshape(module.weight_zero_point.shape))
    if hasattr(module, "input_global_scale"):
        module.input_global_scale.data.copy_(generate_gparam(torch.tensor([-8.0]), torch.tensor([8.0])))
    elif hasattr(module, "input_scale"):
        module.input_scale.data.copy_(calculate_qparams(torch.tensor([-8.0]), torch.tensor([8.0]), activations)[0])
    zero_points = getattr(module, "weight_zero_point", None)
    plain = fake_quantize(module.weight.detach(), module.weight_scale, zero_points, weights, **options)
    return plain.bfloat16().float() if options else plain  # nvfp4's package undoes it in bf16


def extremes(weight: torch.Tensor, arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if arguments.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if arguments.strategy == "tensor":
        return weight.min()[None], weight.max()[None]
    if arguments.strategy == "block":
        blocks = weight.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.unflatten(1, (-1, arguments.group_size))
    return groups.amin(2), groups.amax(2)


# torchao


def make_torchao(directory: Path, *, config: Callable[[], Any], quantises_activations: bool = False) -> Model | None:
    plain = directory / "plain"
    tiny_llama().save_pretrained(plain)
    quantization = transformers.TorchAoConfig(config())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, quantization_config=quantization, device_map="cpu"
    )
    model.save_pretrained(directory)
    save_tokenizer(directory)
    if quantises_activations:
        return None
    layers = [(name, module.weight) for name, module in model.named_modules() if name.endswith("_proj")]
    return with_weights(tiny_llama(), {f"{name}.weight": weight.dequantize() for name, weight in layers})


def int8_weights() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig()


def int8_dynamic() -> Any:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig

    return Int8DynamicActivationInt8WeightConfig()


def int8_dynamic_per_tensor() -> Any:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, PerTensor

    return Int8DynamicActivationInt8WeightConfig(granularity=PerTensor())


def int4_weights() -> Any:
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup

    return IntxWeightOnlyConfig(torch.int4, PerGroup(GROUP))


def int4_int8_dynamic() -> Any:
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup

    return Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(GROUP))


def float8_weights() -> Any:
    from torchao.quantization import Float8WeightOnlyConfig

    return Float8WeightOnlyConfig()


# formats that transformers reads itself


def make_fp8_blocks(directory: Path) -> Model:
    """As DeepSeek-V3 is stored: float8, with a scale for each block of a matrix."""
    model, weights, plain = tiny_llama(), {}, {}
    for name, weight in model.state_dict().items():
        if name.endswith("proj.weight"):
            blocks = weight.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))
            scales = blocks.abs().amax((1, 3)) / 448
            weights[name.replace(".weight", ".weight_scale_inv")] = scales
            spread = scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
            weights[name] = (weight / spread).to(torch.float8_e4m3fn)
            plain[name] = weights[name].float() * spread
        else:
            weights[name] = weight
    save(directory, model, weights)
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]}
    edit_config(directory, quantization_config=method | {"modules_to_not_convert": ["lm_head"]})
    return with_weights(model, plain)


FP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def make_mxfp4(directory: Path) -> Model:
    """As GPT-OSS is stored: experts in 4 bits, 32 to a scale that is a power of two."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **TINY_DECODER, num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model = plain_model(config)
    weights, plain = {}, {}
    for name, weight in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = weight.shape
            shape = (experts, outputs, inputs // GROUP)
            pairs = torch.randint(0, 256, (*shape, GROUP // 2), dtype=torch.uint8)
            exponents = torch.randint(123, 126, shape, dtype=torch.uint8)  # of 2, plus 127
            weights[f"{name}_blocks"], weights[f"{name}_scales"] = pairs, exponents
            values = FP4_VALUES[torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2).int()]
            plain[name] = (values * 2.0 ** (exponents.float() - 127)[..., None]).flatten(-2).transpose(1, 2)
        else:
            weights[name] = weight
    save(directory, model, weights)
    edit_config(directory, quantization_config={"quant_method": "mxfp4"})
    return with_weights(model, plain)


def save(directory: Path, model: Model, weights: dict[str, torch.Tensor]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, directory / "model.safetensors")
    save_tokenizer(directory, VOCAB_SIZE)


def make_named(directory: Path, **quantization: Any) -> None:
    """Plain weights that say they are quantised: for what is refused before weights are looked at."""
    model = tiny_llama()
    save(directory, model, model.state_dict())
    edit_config(directory, quantization_config=quantization)


def make_unnamed_fp8(directory: Path) -> None:
    """As some tools write it: float8 weights and scales, and no word of it in config.json."""
    make_fp8_blocks(directory)
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]
    (directory / "config.json").write_text(json.dumps(config))


WEIGHTS_ONLY = 1e-4
# An error in the last bit can round an activation to its neighbour among 256, and that shows in the logits.
EIGHT_BIT_ACTIVATIONS = 0.3
PLAIN = "made plain when it is loaded"
AS_PACKAGE = "computed as its package does it"
SHARED = (None, "a text would depend on the batch", "one scale for all tokens of a pass")


def compressed(scheme: str, preset: str, result: tuple[Any, ...], **options: bool) -> Checkpoint:
    return Checkpoint("compressed-tensors", scheme, partial(make_compressed, preset=preset, **options), *result)


def torchao(scheme: str, config: Callable[[], Any], result: tuple[Any, ...]) -> Checkpoint:
    make = partial(make_torchao, config=config, quantises_activations=result[0] != WEIGHTS_ONLY)
    return Checkpoint("torchao", scheme, make, *result)


def named(method: str, note: str, refusal: str, **options: Any) -> Checkpoint:
    return Checkpoint(method, "any", partial(make_named, quant_method=method, **options), None, note, refusal)


CHECKPOINTS = [
    compressed("W8A16", "W8A16", (WEIGHTS_ONLY, PLAIN)),
    compressed("W4A16", "W4A16", (WEIGHTS_ONLY, PLAIN)),
    compressed("W4A16, the head too", "W4A16", (WEIGHTS_ONLY, PLAIN), head=True),
    compressed("W4A16, zero points", "W4A16_ASYM", (WEIGHTS_ONLY, PLAIN)),
    compressed("NVFP4A16", "NVFP4A16", (WEIGHTS_ONLY, PLAIN)),
    compressed("MXFP4A16", "MXFP4A16", (WEIGHTS_ONLY, PLAIN)),
    compressed("W8A8", "W8A8", (EIGHT_BIT_ACTIVATIONS, AS_PACKAGE)),
    compressed("W8A8, with a KV scheme", "W8A8", (EIGHT_BIT_ACTIVATIONS, f"{AS_PACKAGE}; KV in full"), kv=True),
    compressed("W4A8", "W4A8", (EIGHT_BIT_ACTIVATIONS, AS_PACKAGE)),
    compressed("FP8, static", "FP8", (EIGHT_BIT_ACTIVATIONS, AS_PACKAGE)),
    compressed("FP8, per token", "FP8_DYNAMIC", (EIGHT_BIT_ACTIVATIONS, AS_PACKAGE)),
    compressed("FP8, blocks", "FP8_BLOCK", (EIGHT_BIT_ACTIVATIONS, AS_PACKAGE)),
    compressed("W8A8, one scale a pass", "W8A8", SHARED, dynamic_tensor=True),
    torchao("int8 weights", int8_weights, (WEIGHTS_ONLY, AS_PACKAGE)),
    torchao("int4 weights", int4_weights, (WEIGHTS_ONLY, AS_PACKAGE)),
    torchao("float8 weights", float8_weights, (WEIGHTS_ONLY, AS_PACKAGE)),
    torchao("int8, per token", int8_dynamic, (EIGHT_BIT_ACTIVATIONS, AS_PACKAGE)),
    torchao("int4 weights, int8 per token", int4_int8_dynamic, (EIGHT_BIT_ACTIVATIONS, AS_PACKAGE)),
    torchao("int8, one scale a pass", int8_dynamic_per_tensor, SHARED),
    Checkpoint("fp8", "float8 in blocks", make_fp8_blocks, WEIGHTS_ONLY, PLAIN),
    Checkpoint("mxfp4", "experts in 4 bits", make_mxfp4, WEIGHTS_ONLY, PLAIN),
    named("gptq", "needs optimum and gptqmodel", "pip install optimum", bits=4),
    named("awq", "needs gptqmodel", "pip install gptqmodel", bits=4),
    named("bitsandbytes", "needs bitsandbytes", "bitsandbytes", load_in_8bit=True),
    named("hqq", "needs hqq", "HQQ"),
    named("fbgemm_fp8", "needs a GPU", "requires a GPU"),
    named("modelopt", "unknown to transformers", "modelopt, which transformers cannot load", quant_algo="FP8"),
    Checkpoint(
        "none named", "float8", make_unnamed_fp8, None, "config.json does not say how to read it",
        "F8_E4M3, but config.json has no quantization_config",
    ),
]  # fmt: skip
