"""The small real model in bfloat16, against transformers in the same type."""

import pytest
import torch
from transformers import AutoTokenizer

from executor_svc.model.demo_model import demo_model_path
from executor_svc.model.load import load
from tests.margin import assert_drawn, greedy_gaps, reference_logits, reference_model
from tests.model.conftest import MAX_ROWS, settings_for
from tests.model.driver import Driver, Sequence, row_sampling

pytestmark = pytest.mark.model

# Logits of 16 to 32 are 0.125 apart in bfloat16: two steps, and a near-tie is any choice that is not the best.
MARGIN_NATS = 0.25
MOST_NEAR_TIES = 13  # of 256 tokens: one in twenty
NUM_OUTPUTS = 32
PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a",
    "def fibonacci(n):\n",
    "Water boils at",
    "The three primary colours are",
    "In 1969, the first man",
    "A recipe for bread:",
    "Shakespeare wrote",
]


@pytest.fixture(scope="module")
def directory():
    return demo_model_path()


@pytest.fixture(scope="module")
def loaded(directory):
    return load(settings_for(directory, dtype="auto", block_size=16, num_blocks=400))


@pytest.fixture(scope="module")
def reference(directory):
    return reference_model(directory, torch.bfloat16)


@pytest.fixture(scope="module")
def prompts(directory):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [tokenizer(prompt).input_ids for prompt in PROMPTS]


def test_what_was_converted_is_what_it_was_made_from(loaded, prompts):
    facts = loaded.facts
    assert (facts.architecture, facts.dtype, facts.vocab_size) == ("Gemma3ForCausalLM", "bfloat16", 262144)
    assert (list(facts.eos_token_ids), facts.bos_token_id) == ([1], 2)
    assert all(prompt[0] == 2 for prompt in prompts)


def test_greedy_choices_are_within_the_margin(loaded, reference, prompts):
    sequences = [Sequence(list(prompt), len(prompt), row_sampling()) for prompt in prompts]
    Driver(loaded, MAX_ROWS).generate(sequences, NUM_OUTPUTS)
    gaps = torch.cat(
        [greedy_gaps(reference_logits(reference, s.token_ids), s.token_ids, s.num_prompt) for s in sequences]
    )
    near_ties = int((gaps > 0).sum())
    print(f"near-ties: {near_ties} of {len(gaps)} tokens, at most {gaps.max():.3f} nats")
    assert len(gaps) == len(PROMPTS) * NUM_OUTPUTS
    assert gaps.max() <= MARGIN_NATS + 1e-9  # they are differences of logarithms, which are rounded, too
    assert near_ties <= MOST_NEAR_TIES


def test_drawn_tokens_are_within_the_margin(loaded, reference, prompts):
    sampling = [row_sampling(temperature=0.8, top_k=50, seed=seed) for seed in range(3)]
    sequences = [
        Sequence(list(prompt), len(prompt), parameters) for prompt, parameters in zip(prompts, sampling, strict=False)
    ]
    Driver(loaded, MAX_ROWS).generate(sequences, NUM_OUTPUTS, chunk=3)
    for sequence in sequences:
        logits = reference_logits(reference, sequence.token_ids)
        # A logit that is off by one step of bfloat16 moves a probability of one half by about this much.
        assert_drawn(logits, sequence.token_ids, sequence.num_prompt, sequence.sampling, margin=0.1)
