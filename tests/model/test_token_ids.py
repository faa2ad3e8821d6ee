"""Ids that a model may produce, and those that end a text: C8.8 and C8.10."""

import itertools
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList

from executor_svc.model.facts import gather_facts
from executor_svc.model.load import load
from executor_svc.model.ready_tokenizer import make_ready
from tests.margin import reference_model
from tests.model.conftest import MAX_ROWS, settings_for
from tests.model.driver import Driver, Sequence, row_sampling
from tests.tiny_models import TINY_DECODER, save_model, save_tokenizer

MISSING = object()


def set_entry(file, name: str, value) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    content.pop(name, None)
    if value is not MISSING:
        content[name] = value
    file.write_text(json.dumps(content))


# C8.8: more outputs than the tokenizer has texts


def padded(directory, num_known: int) -> None:
    """Outputs past the tokenizer's win by far, whatever the context."""
    save_tokenizer(directory, num_known)
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"][num_known:] *= 50
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("logprobs", [0, 5, 300])
def test_an_output_without_a_text_is_neither_drawn_nor_listed(directory, logprobs):
    padded(directory, 300)
    loaded = load(settings_for(directory))
    assert loaded.facts.vocab_size == 300
    sampling = [row_sampling(temperature=2.0 * (i % 2), seed=i, logprobs=logprobs) for i in range(MAX_ROWS)]
    sequences = [Sequence([1 + i], 1, sampling[i]) for i in range(MAX_ROWS)]
    Driver(loaded, MAX_ROWS).generate(sequences, 5)
    assert max(max(sequence.outputs) for sequence in sequences) < 300
    for ids, values, _ in itertools.chain.from_iterable(sequence.logprobs for sequence in sequences):
        assert max(ids) < 300
        assert len(set(ids[1:])) == logprobs
        if logprobs == 300:  # all there are: their probabilities add up without the padding's
            assert abs(torch.tensor(values[1:]).double().exp().sum() - 1) < 1e-5


def test_tokens_that_were_added_to_the_tokenizer_count_where_the_model_has_them(directory):
    save_tokenizer(directory, 300)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens(["<house>", "<garden>"])
    tokenizer.save_pretrained(directory)
    assert load(settings_for(directory)).facts.vocab_size == 302


def test_tokens_past_the_models_are_not_its_vocabulary(directory):
    save_tokenizer(directory, 400)
    loaded = load(settings_for(directory))
    assert loaded.facts.vocab_size == 320
    sequence = Sequence([319], 1, row_sampling(temperature=5.0, logprobs=20))
    Driver(loaded, MAX_ROWS).generate([sequence], 5)
    assert max(max(ids) for ids, _, _ in sequence.logprobs) < 320


# C8.10: end tokens in any file


class Forced(LogitsProcessor):
    """The model says this token, and nothing else."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.token] = 0
        return forced


def stops_at(model, token: int) -> bool:
    """Whether generate of transformers ends a text at that token."""
    forced = LogitsProcessorList([Forced(token)])
    prompt = torch.tensor([[1, 2]])
    ids = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=2, logits_processor=forced, do_sample=False
    )
    return ids.shape[1] == 3


ENTRIES = {"int": 5, "list": [6, 7], "null": None, "missing": MISSING}
CANDIDATES = (2, 5, 6, 7, 8, 9, 10, 257)


@pytest.mark.parametrize("in_config", ENTRIES)
@pytest.mark.parametrize("in_generation", [*ENTRIES, "no file"])
@pytest.mark.parametrize("in_tokenizer", [None, "</s>"])
@pytest.mark.parametrize("pad", [None, 257])
def test_a_text_ends_at_the_end_tokens_of_all_files(directory, in_config, in_generation, in_tokenizer, pad):
    config, generation = ENTRIES[in_config], ENTRIES.get(in_generation, MISSING)
    if isinstance(generation, int):
        generation = 8
    if isinstance(generation, list):
        generation = [9, 10]
    set_entry(directory / "config.json", "eos_token_id", config)
    set_entry(directory / "config.json", "pad_token_id", pad)
    set_entry(directory / "generation_config.json", "eos_token_id", generation)
    set_entry(directory / "generation_config.json", "pad_token_id", pad)
    if in_generation == "no file":
        (directory / "generation_config.json").unlink()
    set_entry(directory / "tokenizer_config.json", "eos_token", in_tokenizer)
    stated = {token for value in (config, generation) for token in (value if isinstance(value, list) else [value])}
    model = reference_model(directory)
    tokenizer = make_ready(directory, trust_remote_code=False).facts
    facts = gather_facts(model, tokenizer, directory, served_name="", max_model_len=64, block_size=4)
    assert set(facts.eos_token_ids) - {257} == stated - {None, MISSING}
    assert (257 in facts.eos_token_ids) == (in_tokenizer is not None)
    theirs = {token for token in CANDIDATES if stops_at(model, token)}
    assert theirs <= set(facts.eos_token_ids)


def test_end_tokens_inside_of_a_nested_configuration_count(tmp_path):
    text = transformers.Gemma3TextConfig(
        **TINY_DECODER | {"eos_token_id": [11, 12]}, head_dim=16, query_pre_attn_scalar=16, sliding_window=8
    )
    config = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config={"hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": 32, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4, image_token_index=258, boi_token_index=259, eoi_token_index=260,
    )  # fmt: skip
    save_model(tmp_path, config)
    set_entry(tmp_path / "config.json", "eos_token_id", MISSING)
    set_entry(tmp_path / "generation_config.json", "eos_token_id", MISSING)
    assert {11, 12, 257} <= set(load(settings_for(tmp_path)).facts.eos_token_ids)


@pytest.mark.parametrize("nonsense", [[10_000], ["5"], "5", True, [[5]], -1, 5.0])
def test_end_tokens_that_are_no_ids_of_the_model_are_left_out(directory, nonsense):
    set_entry(directory / "generation_config.json", "eos_token_id", nonsense)
    tokenizer, model = make_ready(directory, trust_remote_code=False).facts, reference_model(directory)
    facts = gather_facts(model, tokenizer, directory, served_name="", max_model_len=64, block_size=4)
    assert list(facts.eos_token_ids) == [257]
