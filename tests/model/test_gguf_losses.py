"""What transformers would lose of a GGUF file is refused by name: C8.12."""

import json

import gguf
import pytest
import torch
import transformers

from executor_svc.model.gguf import converted
from executor_svc.model.gguf_losses import _lost_setting, check_losses
from executor_svc.model.load import load
from executor_svc.model.refusal import ModelRefused
from scheduler_svc.text.tokenizer import Tokenizer as SchedulerTokenizer
from tests.model.conftest import settings_for
from tests.model.gguf_files import write_llama_gguf
from tests.model.test_gguf import many_texts
from tests.text.models import KINDS
from tests.tiny_models import TINY_DECODER, save_model


def scaling_by_name(writer):
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)


def scaling_by_factors(writer):
    """As Llama 3.1 is stored."""
    writer.add_tensor("rope_freqs.weight", torch.linspace(1, 8, 8).numpy())


def scaling_without_a_name(writer):
    """As older files have it; it is linear."""
    writer.add_rope_scaling_factor(4.0)


@pytest.mark.parametrize("edit", [scaling_by_name, scaling_by_factors, scaling_without_a_name])
def test_scaled_rotary_positions_that_would_get_lost_are_refused(tiny_directories, tmp_path, edit):
    file = tmp_path / "tiny.gguf"
    write_llama_gguf(file, tiny_directories["llama"], "F32", edit=edit)
    with pytest.raises(ModelRefused, match="scaling of rotary positions"):
        converted(file, tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "value"),
    [("attention.sliding_window", 8), ("logit_scale", 0.5), ("attention.clamp_kqv", 2.0)],
)
def test_settings_that_would_get_lost_are_refused_by_name(tiny_directories, tmp_path, name, value):
    def edit(writer):
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"llama.{name}", value)

    file = tmp_path / "tiny.gguf"
    write_llama_gguf(file, tiny_directories["llama"], "F32", edit=edit)
    with pytest.raises(ModelRefused, match=rf"llama\.{name} \({value:g}\) gets lost"):
        converted(file, tmp_path / "cache")


def test_settings_that_mean_nothing_are_not_missed(tiny_directories, tmp_path):
    def edit(writer):
        writer.add_sliding_window(256)  # as long as the longest sequence
        writer.add_logit_scale(1.0)
        writer.add_rope_scaling_factor(1.0)

    file = tmp_path / "tiny.gguf"
    write_llama_gguf(file, tiny_directories["llama"], "F32", edit=edit)
    assert converted(file, tmp_path / "cache").is_dir()


@pytest.mark.parametrize("pre", ["smollm", "deepseek-llm", "default", None])
def test_a_way_to_take_texts_apart_that_would_get_lost_is_refused(tiny_directories, tmp_path, pre):
    file = tmp_path / "tiny.gguf"
    write_llama_gguf(file, tiny_directories["llama"], "F32", pre=pre or "")
    with pytest.raises(ModelRefused, match=f"how texts are taken apart .tokenizer.ggml.pre = {pre}. gets lost"):
        converted(file, tmp_path / "cache")


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (transformers.StableLmConfig(), "rope.freq_base", 5e5),
        (transformers.Gemma2Config(), "attn_logit_softcapping", 30.0),
        (transformers.Gemma2Config(), "attention.layer_norm_rms_epsilon", 1e-5),
        (transformers.Phi3Config(sliding_window=None), "attention.sliding_window", 2047),
    ],
)
def test_a_setting_is_lost_where_the_configuration_says_something_else(config, name, value):
    fields = {"general.architecture": "any", f"any.{name}": value}
    assert _lost_setting(fields, config) == f"any.{name} ({value:g})"


def test_the_largest_gemma_2_is_refused_whose_scale_is_in_no_file(tiny_directories, tmp_path):
    file = tmp_path / "tiny.gguf"
    write_llama_gguf(file, tiny_directories["llama"], "F32", pre="gpt-2")
    reader = gguf.GGUFReader(file)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_directories["llama"])
    check_losses(tmp_path, reader, transformers.Gemma2Config(), tokenizer)
    with pytest.raises(ModelRefused, match=r"attention\.scale gets lost"):
        check_losses(tmp_path, reader, transformers.Gemma2Config(num_hidden_layers=46), tokenizer)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    """A tiny Llama with a tokenizer as that of Llama 2, and what its GGUF file has instead of merges."""
    directory, library = tmp_path_factory.mktemp("sentencepiece"), KINDS["byte_fallback_strip"]
    ends = {"bos_token_id": library.token_to_id("<s>"), "eos_token_id": library.token_to_id("</s>")}
    sizes = {"vocab_size": library.get_vocab_size(), "pad_token_id": None}
    save_model(directory, transformers.LlamaConfig(**TINY_DECODER | sizes | ends))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}
    (directory / "tokenizer.json").write_text(library.to_str())
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    ranks = {"".join(merge): i for i, merge in enumerate(json.loads(library.to_str())["model"]["merges"])}
    kinds = {token.content: 3 if token.special else 4 for token in library.get_added_tokens_decoder().values()}
    kinds |= {"<unk>": 2}

    def edit(writer):
        tokens = [library.id_to_token(i) for i in range(library.get_vocab_size())]
        for name in ("model", "merges", "pre", "token_type"):
            del writer.kv_data[0][f"tokenizer.ggml.{name}"]
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(ranks.get(token, 0)) for token in tokens])
        writer.add_token_types([kinds.get(token, 6 if token.startswith("<0x") else 1) for token in tokens])
        writer.add_unk_token_id(library.token_to_id("<unk>"))

    return directory, edit


def test_a_sentencepiece_vocabulary_gives_the_ids_of_the_original(sentencepiece, tmp_path):
    directory, edit = sentencepiece
    file = tmp_path / "tiny.gguf"
    write_llama_gguf(file, directory, "F32", edit=edit)
    ours = SchedulerTokenizer.from_bundle(load(settings_for(file, cache_dir=tmp_path / "cache")).bundle)
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    for text in many_texts():
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


def test_a_sentencepiece_vocabulary_without_a_space_before_texts_is_refused(sentencepiece, tmp_path):
    directory, edit = sentencepiece
    file = tmp_path / "tiny.gguf"

    def without_space(writer):
        edit(writer)
        writer.add_add_space_prefix(False)

    write_llama_gguf(file, directory, "F32", edit=without_space)
    with pytest.raises(ModelRefused, match=r"add_space_prefix \(False\) gets lost"):
        converted(file, tmp_path / "cache")


@pytest.mark.parametrize("ends", [(True, False), (False, False), (True, True)])
def test_a_text_begins_and_ends_as_the_file_says(tiny_directories, tmp_path, ends):
    def edit(writer):
        writer.add_add_bos_token(ends[0])
        writer.add_add_eos_token(ends[1])

    file = tmp_path / "tiny.gguf"
    write_llama_gguf(file, tiny_directories["llama"], "F32", edit=edit)
    ours = SchedulerTokenizer.from_bundle(load(settings_for(file, cache_dir=tmp_path / "cache")).bundle)
    assert ours.encode("a") == [256] * ends[0] + ours.encode("a", False) + [257] * ends[1]
