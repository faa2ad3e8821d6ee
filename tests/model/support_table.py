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
from tests.model.families import REFUSED, SERVED, tiny_config
from tests.model.test_families import SITUATIONS
from tests.model.test_positions import FAMILIES as LEARNED_POSITIONS
from tests.model.test_refusals import random_model, understand
from tests.model.test_windows import WINDOWS

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
