"""What it costs in accuracy to keep weights, or keys and values, in 8 bits: a real model reads text.

    python -m benchmarks.int8_accuracy --json

The model (by default the demo's) is loaded as an executor does, once in fp32 and then in bf16: as it is, with
`int8_kv`, with `int8_weights`, and with both. Each reads the same text, and what it expects of each next token is
compared with what the model in fp32 expects: how far the distribution is off (Kullback-Leibler divergence, in nats),
how far the log-probability of the text's own next token is (on average, with its sign: what a text loses; and without),
and how often the likeliest token is the same. The text is this repository's own.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from executor_svc import logs
from executor_svc.model.demo_model import demo_model_path
from executor_svc.model.load import load
from executor_svc.model.runner import ModelRunner
from executor_svc.settings import parse

TEXTS = ("README.md", "docs/architecture.md", "LICENSE")
TOKENS = 512  # of a piece of text, read from its beginning without what is before it
AT_ONCE = 64  # tokens whose distributions are held
BLOCK = 16
VARIANTS = {
    "bf16": (),
    "int8_kv": ("--int8-kv",),
    "int8_weights": ("--int8-weights",),
    "int8_weights and int8_kv": ("--int8-weights", "--int8-kv"),
}


@dataclass(frozen=True, slots=True)
class Difference:
    """From the model in fp32, on average over all tokens."""

    kl_nats: float
    logprob_lost: float  # nats, of the text's next token
    logprob_off: float  # the same without its sign
    same_top: float  # share of tokens


def pieces(model: str, num_pieces: int) -> list[torch.Tensor]:
    """Token ids `[TOKENS]`, `num_pieces` of each text."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    root = Path(__file__).parent.parent
    found = []
    for name in TEXTS:
        ids = torch.tensor(tokenizer((root / name).read_text(), add_special_tokens=False).input_ids)
        found += list(ids[: len(ids) // TOKENS * TOKENS].view(-1, TOKENS)[:num_pieces])
    return found


def load_runner(model: str, dtype: str, *flags: str) -> ModelRunner:
    """As an executor with these flags, but with room for one piece of text."""
    room = ["--num-blocks", str(TOKENS // BLOCK + 2), "--max-rows", str(AT_ONCE), "--tokens-per-step", str(TOKENS)]
    kind = ["--model", model, "--dtype", dtype, "--device", "cpu", "--block-size", str(BLOCK)]
    loaded = load(parse([*kind, *room, *flags]))
    runner = loaded.runner
    if not isinstance(runner, ModelRunner):
        raise TypeError(f"{model}: is served by {type(runner).__name__}, which gives no logits")
    return runner


def logprobs(runner: ModelRunner, ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """float32 `[AT_ONCE, vocabulary]` of one part of the piece after another: what is expected after each token."""
    num_blocks = len(ids) // BLOCK
    positions = torch.arange(len(ids))
    columns = {
        "token_ids": ids,
        "positions": positions,
        "slots": positions + BLOCK,
        "query_start": torch.tensor([0, len(ids)], dtype=torch.int32),
        "context_lens": torch.tensor([len(ids)], dtype=torch.int32),
        "block_tables": torch.arange(1, num_blocks + 1, dtype=torch.int32)[None],
    }
    _, head = runner.forward.logits_and_head(columns, positions[-1:])
    for part in positions.split(AT_ONCE):
        yield torch.log_softmax(head(part).float(), -1)


def differences(got: torch.Tensor, right: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """float64 `[4]`: sums over tokens of what `Difference` has averages of."""
    lost = (right - got).gather(1, following[:, None])[:, 0].double()
    kl = (right.exp() * (right - got)).sum(-1)
    same = got.argmax(-1) == right.argmax(-1)
    return torch.stack([kl.double().sum(), lost.sum(), lost.abs().sum(), same.double().sum()])


@torch.inference_mode()
def measure(model: str, num_pieces: int) -> dict[str, Difference]:
    texts = pieces(model, num_pieces)
    exact = load_runner(model, "float32")
    runners = {name: load_runner(model, "bfloat16", *flags) for name, flags in VARIANTS.items()}
    sums = {name: torch.zeros(4, dtype=torch.float64) for name in runners}
    for ids in texts:
        parts = zip(*(logprobs(runner, ids) for runner in (exact, *runners.values())), strict=True)
        for following, (right, *all_got) in zip(ids.roll(-1).split(AT_ONCE), parts, strict=True):
            for name, got in zip(runners, all_got, strict=True):
                sums[name] += differences(got, right, following)
    count = sum(len(ids) for ids in texts)
    return {name: Difference(*(total / count).tolist()) for name, total in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory; the demo's model if not given")
    parser.add_argument("--pieces", type=int, default=2, help=f"pieces of {TOKENS} tokens of each text")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    arguments = parser.parse_args()
    logs.configure("warning", "console")
    model = arguments.model or str(demo_model_path())
    found = measure(model, arguments.pieces)
    if arguments.json:
        print(json.dumps({name: as_dict(difference) for name, difference in found.items()}))
        return
    print(f"{'':26} {'KL, nats':>10} {'lost, nats':>11} {'off, nats':>10} {'same likeliest':>15}")
    for name, d in found.items():
        print(f"{name:26} {d.kl_nats:10.5f} {d.logprob_lost:11.5f} {d.logprob_off:10.5f} {d.same_top:15.2%}")


def as_dict(difference: Difference) -> dict[str, Any]:
    return {name: round(getattr(difference, name), 6) for name in Difference.__slots__}


if __name__ == "__main__":
    main()
