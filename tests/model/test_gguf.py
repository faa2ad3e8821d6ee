"""A conversion happens once, whole or not at all."""

import multiprocessing
import os
import random
import subprocess
import sys
import time
from types import SimpleNamespace

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers

from executor_svc.model.gguf import _dtype, converted, made_once
from executor_svc.model.load import load
from executor_svc.model.refusal import ModelRefused
from scheduler_svc.text.tokenizer import Tokenizer as SchedulerTokenizer
from tests.margin import assert_greedy, assert_logprobs, reference_logits, reference_model
from tests.model.conftest import MAX_ROWS, random_ids, settings_for
from tests.model.driver import Driver
from tests.model.gguf_files import GGUF_TYPES, ROWS_OF_256, write_llama_gguf
from tests.model.test_margin import greedy
from tests.text.models import KINDS
from tests.tiny_models import TINY_DECODER, VOCAB_SIZE, save_model


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


@pytest.mark.parametrize("stored_as", GGUF_TYPES)
def test_weights_come_out_as_they_are_stored(tmp_path, stored_as):
    """To the bit where the file's type is a plain one, and rounded to bfloat16 where it is quantised."""
    directory = save_model(tmp_path / "original", transformers.LlamaConfig(**TINY_DECODER | ROWS_OF_256))
    file, dtype = tmp_path / "tiny.gguf", GGUF_TYPES[stored_as]
    stored = write_llama_gguf(file, directory, stored_as)
    weights = load_file(converted(file, tmp_path / "cache") / "model.safetensors")
    assert weights.keys() == stored.keys()
    for name, weight in weights.items():
        assert weight.dtype == dtype
        assert torch.equal(weight, stored[name].to(dtype)), name


@pytest.mark.parametrize(("stored_as", "dtype"), [("F32", "float32"), ("F16", "float16")])
def test_a_file_is_a_model_with_a_name_an_end_and_a_tokenizer(tiny_directories, tmp_path, stored_as, dtype):
    directory = tiny_directories["llama"]
    file = tmp_path / "tiny.gguf"
    write_llama_gguf(file, directory, stored_as)
    loaded = load(settings_for(file, dtype="auto", cache_dir=tmp_path / "cache"))
    assert (loaded.facts.name, loaded.facts.dtype, loaded.facts.vocab_size) == ("tiny", dtype, VOCAB_SIZE)
    assert list(loaded.facts.eos_token_ids) == [257]
    converted_directory = next(path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    expected, found = (Tokenizer.from_file(str(d / "tokenizer.json")) for d in (directory, converted_directory))
    for text in ("plain", " a  b\n", "123 45", "Ünï çödé", "日本語", "def f(x):\n    return x"):
        assert found.encode(text, add_special_tokens=False).ids == expected.encode(text).ids


def test_a_gguf_without_one_of_the_weights_is_refused_by_name(tiny_directories, tmp_path):
    file, lost = tmp_path / "tiny.gguf", "model.layers.1.mlp.up_proj.weight"
    write_llama_gguf(file, tiny_directories["llama"], "F32", left_out=lost)
    with pytest.raises(ModelRefused, match=lost):
        converted(file, tmp_path / "cache")


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Key heads, and how texts are taken apart: as llama.cpp calls it, and the pattern.
KINDS_OF_LLAMA = {"as many key heads": (4, "gpt-2", None), "fewer key heads": (2, "llama-bpe", LLAMA_3)}


@pytest.fixture(scope="module", params=KINDS_OF_LLAMA)
def original(request, tmp_path_factory):
    """A tiny Llama whose tokenizer has merges, special tokens and some that were added. Directory and `pre`."""
    num_key_heads, pre, pattern = KINDS_OF_LLAMA[request.param]
    directory = tmp_path_factory.mktemp("original")
    library = Tokenizer.from_str(KINDS["byte_level"].to_str())
    library.add_special_tokens([AddedToken("<｜User｜>", normalized=False)])
    if pattern:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    ends = {"bos_token_id": library.token_to_id("<s>"), "eos_token_id": library.token_to_id("</s>")}
    sizes = {"vocab_size": library.get_vocab_size(), "num_key_value_heads": num_key_heads, "pad_token_id": None}
    save_model(directory, transformers.LlamaConfig(**TINY_DECODER | sizes | ends))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=library, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(directory)
    return directory, pre


def many_texts() -> list[str]:
    """200 texts of all kinds, and mixtures of them."""
    stems = [
        "0123456789", "3.14159", "1 22 333 4444 55555", " ", "  ", "   three", "tab\tand\nline\r\n", "a  b   c",
        "Größe, naïve façade", "é e\u0301", "Привет, мир", "<s>", "</s>", "<|mark|>", "a<s>b</s>c",
        "<｜User｜>hi<｜User｜>", "<tool>x<tool>",
        "漢字かな交じり文", "汉\u00a0字", "한국어", "😀👨‍👩‍👧‍👦", "def f(x):\n    return x ** 2  # y", "x != y && z",
        "I'll, you've, he'd",         "THE QUICK brown Fox", "http://example.org/?a=1&b=2",
    ]  # fmt: skip
    chance = random.Random(5)
    return stems + ["".join(chance.sample(stems, chance.randrange(2, 5))) for _ in range(200 - len(stems))]


@pytest.mark.parametrize("quantisation", ["F32", "F16"])
def test_a_gguf_model_has_the_ids_and_the_numbers_of_the_original(original, tmp_path, quantisation):
    directory, pre = original
    file = tmp_path / "tiny.gguf"
    write_llama_gguf(file, directory, quantisation, pre=pre)
    loaded = load(settings_for(file, cache_dir=tmp_path / "cache"))
    ours = SchedulerTokenizer.from_bundle(loaded.bundle)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    for text in many_texts():
        assert ours.encode(text) == theirs(text)["input_ids"], text
        ids = theirs(text)["input_ids"]
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids), text
    # In the file's type and then in fp32: F16 rounds the weights.
    reference = reference_model(directory, {"F32": torch.float32, "F16": torch.float16}[quantisation]).float()
    sequences = [greedy(random_ids(length, length)) for length in (1, 9, 20)]
    Driver(loaded, MAX_ROWS).generate(sequences, 8, chunk=7)
    for sequence in sequences:
        logits = reference_logits(reference, sequence.token_ids)
        assert_greedy(logits, sequence.token_ids, sequence.num_prompt)
        assert_logprobs(logits, sequence.token_ids, sequence.num_prompt, sequence.logprobs)


@pytest.mark.parametrize("template", [None, "{{ bos_token }}{{ messages[0].content }}"])
def test_a_chat_template_comes_along_where_the_file_has_one(tiny_directories, tmp_path, template):
    def edit(writer):
        if template:
            writer.add_chat_template(template)

    file = tmp_path / "tiny.gguf"
    write_llama_gguf(file, tiny_directories["llama"], "F32", edit=edit)
    ours = SchedulerTokenizer.from_bundle(load(settings_for(file, cache_dir=tmp_path / "cache")).bundle)
    assert ours.has_chat_template == (template is not None)
    if template:
        assert ours.encode_chat([{"role": "user", "content": "hi"}]) == [256, *ours.encode("hi", False)]


def test_ends_of_a_turn_and_of_a_message_end_a_text_too(tiny_directories, tmp_path):
    def edit(writer):
        writer.add_eot_token_id(261)
        writer.add_eom_token_id(262)

    file = tmp_path / "tiny.gguf"
    write_llama_gguf(file, tiny_directories["llama"], "F32", edit=edit)
    loaded = load(settings_for(file, cache_dir=tmp_path / "cache"))
    assert list(loaded.facts.eos_token_ids) == [257, 261, 262]


def test_an_architecture_that_transformers_cannot_read_is_refused_by_name(tiny_directories, tmp_path):
    file = tmp_path / "tiny.gguf"
    write_llama_gguf(file, tiny_directories["llama"], "F32", architecture="mamba3")
    with pytest.raises(ModelRefused, match="mamba3"):
        converted(file, tmp_path / "cache")


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ({"F32"}, "float32"),
        ({"F16"}, "float16"),
        ({"F16", "F32"}, "float16"),  # a router of experts is F32 beside any type
        ({"BF16", "F32"}, "bfloat16"),
        ({"F16", "Q8_0"}, "bfloat16"),
    ],
)
def test_plain_weights_keep_the_type_of_the_file(types, expected):
    matrices = [SimpleNamespace(tensor_type=gguf.GGMLQuantizationType[name], shape=(2, 2)) for name in sorted(types)]
    norm = SimpleNamespace(tensor_type="F32", shape=(2,))
    assert _dtype(SimpleNamespace(tensors=[norm, *matrices])) == expected
