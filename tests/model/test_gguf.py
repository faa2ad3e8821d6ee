"""A conversion happens once, whole or not at all."""

import json
import multiprocessing
import os
import subprocess
import sys
import time

import gguf
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from executor_svc.model.gguf import converted, made_once
from executor_svc.model.load import load
from executor_svc.model.refusal import ModelRefused
from tests.model.conftest import settings_for
from tests.tiny_models import VOCAB_SIZE


def make_and_log(directory, log, barrier):
    def make(making):
        with log.open("a") as stream:
            stream.write("made\n")
        (making / "first").write_text("1")
        (making / "second").write_text("2")

    barrier.wait(timeout=30)
    made = made_once(directory, make)
    assert sorted(file.name for file in made.iterdir()) == ["first", "second"]


def test_of_several_processes_one_makes_it_and_all_find_it_whole(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    arguments = (tmp_path / "made", tmp_path / "log", barrier)
    processes = [context.Process(target=make_and_log, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert (tmp_path / "log").read_text() == "made\n"


def test_what_fails_half_way_leaves_nothing_and_may_be_tried_again(tmp_path):
    def fail(making):
        (making / "first").write_text("1")
        raise ModelRefused("no")

    with pytest.raises(ModelRefused):
        made_once(tmp_path / "made", fail)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    made = made_once(tmp_path / "made", lambda making: (making / "first").write_text("1"))
    assert (made / "first").read_text() == "1"


def test_a_process_that_dies_half_way_holds_up_nobody(tmp_path):
    code = (
        "import pathlib, signal, os, sys\n"
        "from executor_svc.model.gguf import made_once\n"
        "made_once(pathlib.Path(sys.argv[1]), lambda making: os.kill(os.getpid(), signal.SIGKILL))\n"
    )
    dead = subprocess.run([sys.executable, "-c", code, str(tmp_path / "made")], timeout=60, check=False)
    assert dead.returncode == -9
    assert made_once(tmp_path / "made", lambda making: None).is_dir()


def test_a_file_that_is_no_gguf_is_refused_and_leaves_nothing(tmp_path):
    file = tmp_path / "broken.gguf"
    file.write_bytes(os.urandom(4096))
    with pytest.raises(ModelRefused, match=r"broken\.gguf cannot be converted"):
        converted(file, tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_file_that_changed_is_converted_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "executor_svc.model.gguf.convert", lambda file, making: (making / "copy").write_bytes(file.read_bytes())
    )
    file = tmp_path / "model.gguf"
    file.write_bytes(b"one")
    first = converted(file, tmp_path / "cache")
    assert converted(file, tmp_path / "cache") == first
    file.write_bytes(b"two")
    os.utime(file, ns=(time.time_ns(), time.time_ns() + 1))
    second = converted(file, tmp_path / "cache")
    assert (first / "copy").read_bytes() == b"one"
    assert (second / "copy").read_bytes() == b"two"


def write_llama_gguf(file, directory, quantisation, left_out=None):
    """The tiny Llama as llama.cpp lays it out: queries and keys with the two halves of each head interleaved."""
    config = json.loads((directory / "config.json").read_text())
    vocab = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // num_heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types([3 if token in ("<s>", "</s>") else 1 for token in sorted(vocab, key=vocab.__getitem__)])
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(directory / "model.safetensors").items():
        if name == left_out:
            continue
        heads = num_heads if "q_proj" in name else num_kv_heads if "k_proj" in name else None
        if heads:
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        plain = tensor.dim() == 1 or quantisation == gguf.GGMLQuantizationType.F32
        data = tensor.numpy() if plain else tensor.half().numpy()
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), data.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("quantisation", "dtype"), [("F32", "float32"), ("F16", "float16")])
def test_plain_weights_come_out_as_they_were(tiny_directories, tmp_path, quantisation, dtype):
    directory = tiny_directories["llama"]
    file = tmp_path / "tiny.gguf"
    write_llama_gguf(file, directory, gguf.GGMLQuantizationType[quantisation])
    loaded = load(settings_for(file, dtype="auto", cache_dir=tmp_path / "cache"))
    assert (loaded.facts.name, loaded.facts.dtype, loaded.facts.vocab_size) == ("tiny", dtype, VOCAB_SIZE)
    assert list(loaded.facts.eos_token_ids) == [257]
    original = load_file(directory / "model.safetensors")
    converted_directory = next(path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    weights = load_file(converted_directory / "model.safetensors")
    assert weights.keys() == original.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, original[name].to(weight.dtype)), name
    expected, found = (Tokenizer.from_file(str(d / "tokenizer.json")) for d in (directory, converted_directory))
    for text in ("plain", " a  b\n", "123 45", "Ünï çödé", "日本語", "def f(x):\n    return x"):
        assert found.encode(text, add_special_tokens=False).ids == expected.encode(text).ids


def test_a_gguf_without_one_of_the_weights_is_refused_by_name(tiny_directories, tmp_path):
    file, lost = tmp_path / "tiny.gguf", "model.layers.1.mlp.up_proj.weight"
    write_llama_gguf(file, tiny_directories["llama"], gguf.GGMLQuantizationType.F32, left_out=lost)
    with pytest.raises(ModelRefused, match=lost):
        converted(file, tmp_path / "cache")
