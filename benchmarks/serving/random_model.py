"""The model that is served: the shape of Qwen3-0.6B in bf16 with random weights, made once and kept."""

import os
import shutil
import tempfile
from pathlib import Path

from benchmarks.serving.limit import ModelCosts
from benchmarks.serving.workloads import IDS

NAME = "qwen3-random-0.6b-1"  # the last number changes with what is made here
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 1024, 28, 16, 8, 128, 3072, 151_936
MAX_MODEL_LEN = 2048
BYTES_PER_WEIGHT = 2


def costs() -> ModelCosts:
    attention = HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS)
    return ModelCosts(
        layer_weights=LAYERS * (attention + 3 * HIDDEN * INTERMEDIATE),
        head_weights=VOCAB * HIDDEN,
        kv_bytes_per_token=LAYERS * 2 * KV_HEADS * HEAD_DIM * BYTES_PER_WEIGHT,
        bytes_per_weight=BYTES_PER_WEIGHT,
    )


def made_in(cache_dir: Path) -> Path:
    """The model's directory (1.2 GB), made at the first call."""
    directory = cache_dir.expanduser() / NAME
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{NAME}."))
    try:
        _save_model(making)
        _save_tokenizer(making)
        os.replace(making, directory)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise
    return directory


def _save_model(directory: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=INTERMEDIATE,
        vocab_size=VOCAB,
        tie_word_embeddings=True,
        max_position_embeddings=2 * MAX_MODEL_LEN,
        dtype="bfloat16",
    )
    model = Qwen3ForCausalLM(config)
    model.to(dtype=torch.bfloat16)  # type: ignore[call-arg]  # its signature is hidden by a wrapper
    model.save_pretrained(directory)


def _save_tokenizer(directory: Path) -> None:
    """A token for each byte, and numbers for the rest, so that every id has a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "<s>", "</s>"])}
    vocab |= {f"Ġ{i}": i for i in range(len(vocab), VOCAB)}
    assert max(IDS) < VOCAB
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(directory)
