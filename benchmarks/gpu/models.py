"""Models made on the spot, with random weights: nothing is downloaded."""

from dataclasses import replace
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from benchmarks.gpu.backends import checked_backend, checked_dtypes
from benchmarks.gpu.graphs import runner_of
from executor_svc import logs
from executor_svc.loaded import LoadedModel
from executor_svc.model.attention import PagedLayer, attach
from executor_svc.model.load import load
from executor_svc.settings import ExecutorSettings

NUM_BYTES = 256
BOS_ID, EOS_ID = NUM_BYTES, NUM_BYTES + 1


def margin_configs(*, tiny: bool) -> dict[str, transformers.PreTrainedConfig]:
    """Grouped heads and full attention; and one group of wide heads, with windows in most layers.

    Weights are spread widely enough that attention is not uniform, which would hide a lost token.
    """
    hidden, vocab, window = (64, 320, 8) if tiny else (512, 4096, 64)
    common = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "initializer_range": 1.6 * hidden**-0.5,
        "max_position_embeddings": 1024,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
    }
    layer_types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    gemma_dim = 24 if tiny else 256
    return {
        "llama": transformers.LlamaConfig(
            **common, num_hidden_layers=2 if tiny else 4, num_attention_heads=4 if tiny else 8, num_key_value_heads=2
        ),
        "gemma3": transformers.Gemma3TextConfig(
            **common,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=gemma_dim,
            query_pre_attn_scalar=gemma_dim,
            sliding_window=window,
            layer_types=layer_types,
        ),
    }


def qwen3_config(layers: int, *, tiny: bool) -> transformers.PreTrainedConfig:
    """The shape of Qwen3 1.7B, which has 28 layers."""
    hidden, vocab = (64, 320) if tiny else (2048, 151_936)
    return transformers.Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4 if tiny else 16,
        num_key_value_heads=2 if tiny else 8,
        head_dim=16 if tiny else 128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )


def save(config: transformers.PreTrainedConfig, directory: Path, dtype: torch.dtype, device: torch.device) -> Path:
    """A model of that configuration, drawn on the device, and a tokenizer that knows as many ids."""
    disable_progress_bar()
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "<s>", "</s>"])}
    vocab |= {f"<extra_{i}>": i for i in range(len(vocab), config.vocab_size)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(directory)
    return directory


def loaded(directory: Path | str, device: torch.device, dtype: str, **settings: object) -> LoadedModel:
    """As an executor loads it; but on a CPU with the GPU's kernels in Triton's interpreter, where that can compute."""
    logs.configure("warning", "console")  # on stderr
    values = {"block_size": 16, "max_rows": 16, "tokens_per_step": 2048, **settings}
    values |= {"cpu_kernels": "reference"}  # on a CPU Triton reads caches that lie as the reference's do
    model = load(ExecutorSettings(model=str(directory), device=device.type, dtype=dtype, **values))  # type: ignore[arg-type]
    if device.type == "cpu" and runner_of(model).forward.model.dtype in checked_dtypes(device):
        for module in runner_of(model).forward.model.modules():
            for layer in [value for value in vars(module).values() if isinstance(value, PagedLayer)]:
                attach(module, replace(layer, backend=checked_backend(device)))
    return model
