"""Quantised checkpoints are served with the numbers they stand for, or are refused."""

import json

import pytest

from executor_svc.model import quantized
from executor_svc.model.load import load
from executor_svc.model.refusal import ModelRefused
from tests.margin import assert_greedy, assert_logprobs, reference_logits, reference_model
from tests.model.checkpoints import CHECKPOINTS, Checkpoint, edit_config, make_compressed, make_named
from tests.model.conftest import MAX_ROWS, random_ids, settings_for
from tests.model.driver import Driver
from tests.model.test_margin import greedy

SERVED = [checkpoint for checkpoint in CHECKPOINTS if checkpoint.margin_nats is not None]
REFUSED = [checkpoint for checkpoint in CHECKPOINTS if checkpoint.margin_nats is None]


@pytest.mark.parametrize("checkpoint", SERVED, ids=lambda checkpoint: checkpoint.name)
def test_a_quantised_checkpoint_is_served_by_the_margin_rule(tmp_path, checkpoint: Checkpoint):
    reference = checkpoint.make(tmp_path) or reference_model(tmp_path)
    loaded = load(settings_for(tmp_path))
    sequences = [greedy(random_ids(length, length)) for length in (1, 9, 20)]
    Driver(loaded, MAX_ROWS).generate(sequences, 8, chunk=7)
    for sequence in sequences:
        ids, num_prompt = sequence.token_ids, sequence.num_prompt
        logits = reference_logits(reference, ids)
        assert_greedy(logits, ids, num_prompt, checkpoint.margin_nats)
        assert_logprobs(logits, ids, num_prompt, sequence.logprobs, checkpoint.margin_nats)


@pytest.mark.parametrize("checkpoint", REFUSED, ids=lambda checkpoint: checkpoint.name)
def test_a_quantised_checkpoint_that_cannot_be_right_is_refused_with_the_reason(tmp_path, checkpoint: Checkpoint):
    checkpoint.make(tmp_path)
    with pytest.raises(ModelRefused, match=checkpoint.refusal):
        load(settings_for(tmp_path))


@pytest.mark.parametrize("method", ["compressed-tensors", "torchao"])
def test_a_format_whose_package_is_missing_is_refused_with_what_to_install(tmp_path, monkeypatch, method):
    make_named(tmp_path, quant_method=method)
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    with pytest.raises(ModelRefused, match=rf"{method}.* pip install 'paged-inference\[quantized\]'"):
        load(settings_for(tmp_path))


@pytest.mark.parametrize(("preset", "stated", "right"), [("W8A16", 4, 8), ("W4A16", 3, 4), ("W4A16_ASYM", "two", 4)])
def test_packed_weights_of_another_width_than_stated_are_refused_with_theirs(tmp_path, preset, stated, right):
    """Read at a smaller width, they would be other numbers that look like weights, too."""
    make_compressed(tmp_path, preset=preset)
    quantization = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    quantization["config_groups"]["group_0"]["weights"]["num_bits"] = stated
    edit_config(tmp_path, quantization_config=quantization)
    with pytest.raises(ModelRefused, match=f"weight_packed.* num_bits .* is {stated}; set it to {right}$"):
        load(settings_for(tmp_path))
