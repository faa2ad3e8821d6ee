"""Code that comes with a model is run when that is asked for, and not otherwise."""

import pytest
import torch
import transformers

from executor_svc.model.load import load
from tests.model.conftest import MAX_ROWS, Model, random_ids, settings_for
from tests.model.directories import edit_json, refusal
from tests.model.driver import Driver
from tests.model.test_margin import greedy

REMOTE_CONFIG = """
from transformers import LlamaConfig

class HouseConfig(LlamaConfig):
    model_type = "house"
"""
REMOTE_MODEL = """
from transformers import LlamaForCausalLM
from .configuration_house import HouseConfig

class HouseForCausalLM(LlamaForCausalLM):
    config_class = HouseConfig

    def forward(self, *arguments, **options):
        output = super().forward(*arguments, **options)
        output.logits = -output.logits
        return output
"""


@pytest.fixture
def remote(directory, monkeypatch):
    """A model that brings its own code: the tiny Llama with all logits negated."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(directory.parent / "modules"))
    (directory / "configuration_house.py").write_text(REMOTE_CONFIG)
    (directory / "modeling_house.py").write_text(REMOTE_MODEL)
    places = {
        "AutoConfig": "configuration_house.HouseConfig",
        "AutoModelForCausalLM": "modeling_house.HouseForCausalLM",
    }
    edit_json(directory / "config.json", model_type="house", architectures=["HouseForCausalLM"], auto_map=places)
    return directory


def test_code_that_comes_with_a_model_is_not_run_unasked(remote):
    (remote / "configuration_house.py").write_text("raise SystemExit('was run')")
    assert "trust_remote_code" in refusal(remote)


def test_code_that_comes_with_a_model_is_run_when_asked(remote, tiny_directories):
    loaded = load(settings_for(remote, trust_remote_code=True))
    assert loaded.facts.architecture == "HouseForCausalLM"
    sequence = greedy(random_ids(1, 9))
    Driver(loaded, MAX_ROWS).generate([sequence], 1)
    plain = Model(tiny_directories["llama"]).reference(torch.tensor([sequence.token_ids[:9]])).logits[0, -1]
    assert sequence.outputs == [int(plain.argmin())]
