"""Tiny random models, saved as a directory each: small enough to run anywhere, random enough to notice a lost token.

Weights are drawn with standard deviation 0.2; with the usual 0.02 the attention is nearly uniform and hides faults.
"""

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 320
WINDOW = 8
TINY_DECODER = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
}


def _gpt2() -> transformers.PreTrainedConfig:
    return transformers.GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=64, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2,
        bos_token_id=256, eos_token_id=257,
    )  # fmt: skip


def _gemma3() -> transformers.PreTrainedConfig:
    return transformers.Gemma3TextConfig(
        **TINY_DECODER | {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 1},
        head_dim=24, query_pre_attn_scalar=24, sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip


CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**TINY_DECODER),
    "qwen3": lambda: transformers.Qwen3Config(**TINY_DECODER, head_dim=24),
    "mistral": lambda: transformers.MistralConfig(**TINY_DECODER, sliding_window=WINDOW),
    "gemma3": _gemma3,
    "gpt2": _gpt2,
}


def save_tokenizer(directory: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """A token for each byte, then <s>, </s>, one for two spaces, and names for the rest."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "<s>", "</s>", "ĠĠ"])}
    vocab |= {f"<extra_{i}>": i for i in range(len(vocab), vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "Ġ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    fast.save_pretrained(directory)


def save_model(
    directory: Path, config: transformers.PreTrainedConfig, *, seed: int = 0, known_ids: int = VOCAB_SIZE
) -> Path:
    """A random model of that configuration, and a tokenizer of `known_ids` ids."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    save_tokenizer(directory, known_ids)
    return directory


def save_tiny(directory: Path, family: str) -> Path:
    """One of CONFIGS."""
    return save_model(directory / family, CONFIGS[family]())
