"""GGUF files of a tiny Llama, in each type that weights are tried in: the support table is made of this list.

Such a file is written as llama.cpp lays it out: queries and keys with the two halves of each head interleaved.
"""

import json

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

# What the weights become.
GGUF_TYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    **dict.fromkeys(("BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1"), torch.bfloat16),
    **dict.fromkeys(("Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K"), torch.bfloat16),
}
ROWS_OF_256 = {"hidden_size": 256, "intermediate_size": 256}  # as the types with a K need them
# The bytes of a block of 256 at which its scales stand. The package reads these types, and does not write them.
SCALES_AT = {"Q6_K": (208,), "Q5_K": (0, 2), "Q4_K": (0, 2), "Q3_K": (108,), "Q2_K": (80, 82)}


def write_llama_gguf(
    file, directory, stored_as, left_out=None, architecture="llama", pre="llama-bpe", edit=None
) -> dict[str, torch.Tensor]:
    """Write the model of a directory with its matrices as that type. Returns the weights that are in the file."""
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(file, architecture)
    describe(writer, config, json.loads((directory / "tokenizer.json").read_text()), pre)
    if edit:
        edit(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    stored = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if name == left_out:
            continue
        kinds = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        heads = next((num for kind, num in kinds.items() if kind in name), None)
        if heads:
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        kind = gguf.GGMLQuantizationType["F32" if tensor.dim() == 1 else stored_as]
        data = packed(tensor.numpy(), kind)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data, raw_dtype=kind)
        weight = torch.from_numpy(dequantize(data, kind))
        stored[name] = weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2) if heads else weight
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def describe(writer, config, tokenizer, pre) -> None:
    special = {token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    vocab = tokenizer["model"]["vocab"] | added
    tokens = sorted(vocab, key=vocab.__getitem__)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 4 if token in added else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(vocab["<s>"])
    writer.add_eos_token_id(vocab["</s>"])


def packed(tensor, kind):
    """A matrix as that type; of one that cannot be written, blocks of any bytes between scales that keep them small."""
    if kind.name not in SCALES_AT:
        return quantize(tensor, kind)
    block_size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = (tensor.shape[0], tensor.shape[1] // block_size, num_bytes)
    blocks = np.random.default_rng(tensor.size).integers(0, 256, shape, dtype=np.uint8)
    for place in SCALES_AT[kind.name]:
        blocks[..., place : place + 2] = np.array([3e-5], dtype=np.float16).view(np.uint8)
    return blocks.reshape(tensor.shape[0], -1)
