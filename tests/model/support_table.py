"""Makes docs/models.md from what the tests try. `python -m tests.model.support_table --write` renews it."""

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from executor_svc.model import looking
from executor_svc.model.proof import ProvenLayer
from executor_svc.model.refusal import ModelRefused
from tests.model.checkpoints import CHECKPOINTS
from tests.model.directories import SAFETENSORS
from tests.model.families import REFUSED, SERVED, tiny_config
from tests.model.gguf_files import GGUF_TYPES
from tests.model.test_families import SITUATIONS
from tests.model.test_positions import FAMILIES as LEARNED_POSITIONS
from tests.model.test_refusals import random_model, understand
from tests.model.test_rotary import CONFIGURED, LIMITS, LIMITS_OF_PHIMOE, ORIGINAL, ROPES
from tests.model.test_windows import WINDOWS

GGUF_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}  # of the plain types
PAGE = Path(__file__).parents[2] / "docs/models.md"

TEXT = """# Which models are served

Made by `python -m tests.model.support_table --write` from what the tests try, with transformers {version}; a test fails
when this page says anything else. The executor has no such list: it looks at the model that it is given, and rehearses
serving it (see [architecture.md](architecture.md)). An architecture that is not listed here is served if it passes.

## Families

{num_served} families. Each is shown by the margin rule in fp32, greedy and seeded, with log-probabilities, in five
situations: {situations}.
A window is shown to the token by changing one slot at a time, layer by layer, to find which queries see it. Layers are
those of the tiny models that are tried.

{served}

## Refused

The executor ends with the reason, and serves nothing, for these {num_refused} families.

{refused}

## Quantised checkpoints

{checkpoints}

## Weights

Pickled weights (`pytorch_model.bin`) are refused: they run code when they are read. A GGUF file is made into
safetensors once, its quantised weights as bfloat16. It may be of any architecture that transformers can read and that
is served; llama is the one that is tried.

{weights}

## Rotary positions

Of a tiny Llama that stretches an original length of {original} tokens to {configured}. Sequences end at the original
length where keys in a cache could not be right past it: `dynamic` turns all by the length of the whole, and of PhiMoE
transformers computes the factors of short sequences alone.

{ropes}
"""


def page() -> str:
    served = [served_row(family) for family in SERVED]
    refused = [refused_row(family) for family in REFUSED]
    return TEXT.format(
        version=".".join(transformers.__version__.split(".")[:2]),
        num_served=len(served),
        num_refused=len(refused),
        situations=", ".join(SITUATIONS),
        served=table(["type", "architecture", "special", "also shown"], sorted(served)),
        refused=table(["type", "architecture", "reason"], sorted(refused)),
        checkpoints=table(["format", "scheme", "result", "note"], [checkpoint_row(each) for each in CHECKPOINTS]),
        weights=table(["format", "variant", "result"], weight_rows()),
        original=ORIGINAL,
        configured=CONFIGURED,
        ropes=table(["type", "longest sequence", "past the original length"], rope_rows()),
    )


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def served_row(family: str) -> list[str]:
    model = random_model(tiny_config(family, SERVED[family]))
    layers = understand(model)
    windowed = any(layer.window for layer in layers)
    assert windowed <= (family in WINDOWS), f"{family} has a window, which test_windows.WINDOWS does not show"
    also = ["windows to the token"] * windowed + ["positions to the last"] * (family in LEARNED_POSITIONS)
    return [f"`{family}`", type(model).__name__, ", ".join(traits(model, layers)) or "–", ", ".join(also) or "–"]


def refused_row(family: str) -> list[str]:
    model = random_model(tiny_config(family, REFUSED[family]))
    try:
        understand(model)
    except ModelRefused as error:
        # What was measured is not the same everywhere.
        reason = str(error).split(": equal tokens")[0].removeprefix(f"{type(model).__name__} ")
        return [f"`{family}`", type(model).__name__, reason]
    raise AssertionError(f"{family} is in REFUSED and was served")


def checkpoint_row(checkpoint) -> list[str]:
    margin = checkpoint.margin_nats
    result = "refused" if margin is None else f"margin rule, {margin:g} nats"
    return [checkpoint.format, checkpoint.scheme, result, checkpoint.note]


def weight_rows() -> list[list[str]]:
    plain = [kind for kind, dtype in GGUF_TYPES.items() if kind == GGUF_NAMES[dtype]]
    quantised = [kind for kind in GGUF_TYPES if kind not in plain]
    return [
        *(["safetensors", layout, "margin rule"] for layout in SAFETENSORS),
        ["GGUF", ", ".join(plain), "weights to the bit; margin rule for F32 and F16"],
        ["GGUF", ", ".join(quantised), "weights to the bit, rounded to bfloat16"],
    ]


def rope_rows() -> list[list[str]]:
    rows = [(f"`{kind}`", limits, "original_max_position_embeddings" in ROPES[kind]) for kind, limits in LIMITS.items()]
    rows.append(("`longrope` of PhiMoE", LIMITS_OF_PHIMOE, True))
    return [[name, str(limits[0]), past_the_original_length(*limits, named)] for name, limits, named in rows]


def past_the_original_length(longest: int, switch: int, named: bool) -> str:
    """`named`: whether the configuration has an original length beside the one it is stretched to."""
    if longest == ORIGINAL:
        return "ends"
    if switch:
        return "computed anew from its beginning, once, with the factors of long sequences"
    return "goes on" if named else "–"


def traits(model: transformers.PreTrainedModel, layers: list[ProvenLayer]) -> list[str]:
    """What is special about a family, as its own modules and calls show it."""
    calls = Calls()
    tokens = torch.arange(8)
    looking.forward(model, "eager_looked_at", calls, tokens, position_ids=tokens[None])
    windowed = sum(layer.window is not None for layer in layers)
    modules = {name: type(module).__name__ for name, module in model.named_modules()}
    attention_biases = [n for layer in layers for n, _ in layer.module.named_parameters() if n.endswith("bias")]
    found = {
        f"a window in {windowed} of {len(layers)} layers": windowed,
        "capped scores": any(arguments.get("softcap") for arguments in calls.arguments),
        "capped logits": getattr(model.config, "final_logit_softcapping", None),
        "sinks": any(arguments.get("s_aux") is not None for arguments in calls.arguments),
        "a scale of its own": any(calls.scaled),
        "values of another size than keys": any(layer.key_dim != layer.value_dim for layer in layers),
        "heads of several sizes": len({layer.key_dim for layer in layers}) > 1,
        "layers that share keys": len(calls.keys) < len(layers),
        "experts": any("Experts" in kind for kind in modules.values()),
        "learned positions": any(re.search(r"wpe$|(embed_positions|position_embeddings)$", name) for name in modules),
        "biases": attention_biases,
        "tied head": getattr(model.config, "tie_word_embeddings", False),
    }  # fmt: skip
    return [name for name, value in found.items() if value]


class Calls:
    """Looks at what each layer passes to its attention."""

    def __init__(self) -> None:
        looking.register("eager_looked_at")
        self.arguments: list[dict[str, Any]] = []
        self.scaled: list[bool] = []
        self.keys: set[int] = set()
        self._kept: list[torch.Tensor] = []  # so that no two keys have the same place in turn

    def __call__(self, module, heads, mask, arguments) -> torch.Tensor:
        query, key, value = heads
        self._kept.append(key)
        self.keys.add(key.data_ptr())
        self.arguments.append(arguments)
        scaling = arguments.get("scaling")
        self.scaled.append(scaling is not None and abs(scaling * query.shape[-1] ** 0.5 - 1) > 1e-6)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}; otherwise print it")
    text = page()
    if parser.parse_args().write:
        PAGE.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
