"""C8.6: the factors that turn a sequence's queries and keys follow from that sequence's length alone."""

import copy
import inspect

import pytest
import torch
import transformers

from executor_svc.model.load import load
from executor_svc.model.refusal import ModelRefused
from executor_svc.plan import PlanViolation
from tests.margin import assert_drawn, assert_greedy, assert_logprobs, reference_logits
from tests.model.conftest import MAX_ROWS, Model, random_ids, settings_for
from tests.model.driver import Driver
from tests.model.test_margin import NUM_OUTPUTS, drawn, greedy
from tests.tiny_models import TINY_DECODER, save_model

ORIGINAL, CONFIGURED = 32, 128
FACTOR = {"rope_theta": 1e4, "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": FACTOR | {"rope_type": "linear"},
    "dynamic": FACTOR | {"rope_type": "dynamic"},
    "yarn": FACTOR | {"rope_type": "yarn", "original_max_position_embeddings": ORIGINAL},
    "llama3": FACTOR
    | {
        "rope_type": "llama3",
        "original_max_position_embeddings": ORIGINAL,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "longrope": LONGROPE,
}
# The longest sequence, and the length past which keys are turned otherwise, 0 where there is none: of a model of
# an original length of ORIGINAL that is configured for CONFIGURED.
LIMITS = {
    "default": (CONFIGURED, 0),
    "linear": (CONFIGURED, 0),
    "dynamic": (ORIGINAL, 0),
    "yarn": (CONFIGURED, 0),
    "llama3": (CONFIGURED, 0),
    "longrope": (CONFIGURED, ORIGINAL),
}
LIMITS_OF_PHIMOE = (ORIGINAL, 0)  # longrope of another kind
LENGTHS = (8, 31, 32, 33, 100)


def rope_config(rope_type: str):
    length = ORIGINAL if rope_type == "dynamic" else CONFIGURED
    return transformers.LlamaConfig(
        **TINY_DECODER | {"max_position_embeddings": length}, rope_parameters=ROPES[rope_type]
    )


@pytest.fixture(scope="module", params=ROPES)
def model(request, tmp_path_factory):
    return Model(save_model(tmp_path_factory.mktemp(request.param), rope_config(request.param)))


@pytest.fixture(scope="module")
def longrope(tmp_path_factory):
    return Model(save_model(tmp_path_factory.mktemp("longrope"), rope_config("longrope")))


def assert_right(model, *sequences) -> None:
    """By the margin rule, in a pass over the tokens that were computed: the last one was only drawn, and a pass over
    it too could be one of a long sequence."""
    for sequence in sequences:
        ids, num_prompt = sequence.token_ids, sequence.num_prompt
        # A copy for each: with layers of several types, transformers 5.17 fails at a model's second long pass.
        logits = reference_logits(copy.deepcopy(model.reference), ids[:-1])
        if sequence.sampling.temperature == 0:
            assert_greedy(logits, ids, num_prompt)
        else:
            assert_drawn(logits, ids, num_prompt, sequence.sampling)
        assert_logprobs(logits, ids, num_prompt, sequence.logprobs)


def room(model, length: int) -> int:
    """Outputs that a sequence of that many known tokens may have before it has to start anew, or to end."""
    facts = model.loaded.facts
    switch = facts.rope_switch_len
    if switch and length <= switch:
        return min(NUM_OUTPUTS, switch - length + 1)  # the last one is drawn, and not computed
    return min(NUM_OUTPUTS, facts.max_model_len - length)


def test_rows_of_all_lengths_in_one_batch_are_as_each_would_be_alone(model):
    lengths = [length for length in LENGTHS if room(model, length) > 0]
    sequences = [
        make(random_ids(length, length)) for length in lengths for make in (greedy, lambda p: drawn(p, seed=3))
    ]
    driver = Driver(model.loaded, MAX_ROWS)
    rows = {driver.start(sequence): sequence for sequence in sequences}
    while rows := {
        row: s for row, s in rows.items() if len(s.outputs) < room(model, s.num_prompt) or driver.end(row) is None
    }:
        driver.step(chunk=13, rows=list(rows))
    for sequence in sequences:
        assert len(sequence.outputs) == room(model, sequence.num_prompt)
        assert_right(model, sequence)


@pytest.mark.parametrize(("rope_type", "longest", "switch"), [(kind, *limits) for kind, limits in LIMITS.items()])
def test_a_model_says_how_long_its_sequences_are_and_where_keys_change(tmp_path, rope_type, longest, switch):
    facts = load(settings_for(save_model(tmp_path, rope_config(rope_type)))).facts
    assert (facts.max_model_len, facts.rope_switch_len) == (longest, switch)


def test_a_sequence_that_crosses_the_length_starts_anew_and_is_right_on_both_sides(longrope):
    driver = Driver(longrope.loaded, MAX_ROWS)
    other = greedy(random_ids(9, 100))
    sequence = greedy(random_ids(2, ORIGINAL - 3))
    rows = [driver.start(sequence), driver.start(other)]
    while len(sequence.token_ids) <= ORIGINAL:
        driver.step()
    driver.end(rows[0])
    rows[0] = driver.start(sequence)
    driver.run(rows, NUM_OUTPUTS, chunk=7)
    assert len(sequence.token_ids) > ORIGINAL
    for position, (ids, values, rank) in enumerate(sequence.logprobs, sequence.num_prompt):
        before = greedy(sequence.token_ids[:position])
        before.token_ids.append(sequence.token_ids[position])
        before.logprobs = [(ids, values, rank)]
        assert_right(longrope, before)


def test_a_fork_turns_its_keys_as_its_parent_does(longrope):
    for length in (20, 40):
        driver = Driver(longrope.loaded, MAX_ROWS)
        first = drawn(random_ids(3, length), seed=11, index=0)
        row = driver.start(first)
        driver.step()
        fork = driver.fork(row, drawn([0], seed=11, index=1).sampling)
        sequence = driver.sequences[fork]
        sequence.logprobs = list(first.logprobs)
        driver.run([row, fork], 6)
        assert_right(longrope, first)
        sequence.num_prompt = length + 1  # the first output was the parent's
        sequence.logprobs = sequence.logprobs[1:]
        assert_right(longrope, sequence)


def test_a_prefix_of_long_keys_serves_another_long_sequence(longrope):
    driver = Driver(longrope.loaded, MAX_ROWS)
    prefix = random_ids(1, 24)
    first = greedy(prefix + random_ids(2, 20))
    row = driver.start(first)
    driver.step()
    second = greedy(prefix + random_ids(4, 10))
    rows = [row, driver.start(second, shared_from=first, num_shared=len(prefix))]
    driver.run(rows, NUM_OUTPUTS)
    assert_right(longrope, first, second)


def test_a_plan_past_the_length_of_a_row_that_started_short_is_refused(longrope):
    driver = Driver(longrope.loaded, MAX_ROWS)
    driver.start(greedy(random_ids(2, ORIGINAL)))
    driver.step()
    with pytest.raises(PlanViolation, match=f"must end by {ORIGINAL}"):
        driver.step()


def test_each_type_of_layer_has_its_own_factors(tmp_path):
    """Gemma 3: windows of one kind of factors beside full layers of another."""
    config = transformers.Gemma3TextConfig(
        **TINY_DECODER | {"max_position_embeddings": 128, "num_hidden_layers": 3},
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"sliding_attention": ROPES["default"], "full_attention": LONGROPE},
    )
    model = Model(save_model(tmp_path, config))
    assert model.loaded.facts.rope_switch_len == ORIGINAL
    sequences = [greedy(random_ids(length, length)) for length in (5, 20, 33, 100)]
    Driver(model.loaded, MAX_ROWS).generate(sequences, NUM_OUTPUTS, chunk=11)
    assert_right(model, *sequences)


def test_phi3_is_served_past_its_original_length(tmp_path):
    decoder = TINY_DECODER | {"max_position_embeddings": 128}
    config = transformers.Phi3Config(
        **decoder, original_max_position_embeddings=ORIGINAL, rope_parameters=dict(LONGROPE)
    )
    model = Model(save_model(tmp_path, config))
    sequences = [greedy(random_ids(length, length)) for length in (4, 20, 33, 90)]
    Driver(model.loaded, MAX_ROWS).generate(sequences, NUM_OUTPUTS, chunk=16)
    assert_right(model, *sequences)


def test_phimoe_ends_at_its_original_length(tmp_path):
    decoder = TINY_DECODER | {"max_position_embeddings": 128}
    config = transformers.PhimoeConfig(
        **decoder,
        num_local_experts=4,
        original_max_position_embeddings=ORIGINAL,
        rope_parameters=LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.3},
    )
    model = Model(save_model(tmp_path, config))
    assert (model.loaded.facts.max_model_len, model.loaded.facts.rope_switch_len) == LIMITS_OF_PHIMOE
    sequences = [greedy(random_ids(length, length)) for length in (1, 20)]
    Driver(model.loaded, MAX_ROWS).generate(sequences, NUM_OUTPUTS, chunk=16)
    assert_right(model, *sequences)


def test_a_rotary_module_that_is_not_understood_is_refused_where_it_would_matter(tmp_path, monkeypatch):
    directory = save_model(tmp_path, rope_config("longrope"))
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    original = rotary.forward

    def forward(self, x, position_ids):
        return original(self, x, position_ids)

    monkeypatch.setattr(rotary, "forward", forward)
    with pytest.raises(ModelRefused, match="set max_model_len to 32 or less"):
        load(settings_for(directory))
    assert load(settings_for(directory, max_model_len=ORIGINAL)).facts.max_model_len == ORIGINAL


def test_a_rotary_module_that_looks_at_other_tokens_is_refused(tmp_path, monkeypatch):
    directory = save_model(tmp_path, rope_config("longrope"))
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    inner = inspect.unwrap(rotary.forward)

    def looks(self, x, position_ids):
        cos, sin = inner(self, x, position_ids)
        return cos * (1 + position_ids.max()), sin

    monkeypatch.setattr(rotary.forward, "__wrapped__", looks)
    with pytest.raises(ModelRefused, match="in a way that is not understood"):
        load(settings_for(directory))


def test_nothing_in_a_step_waits_for_the_highest_position(longrope):
    """What would be a wait for the device shows on the meta device as an error."""
    rotary = copy.deepcopy(longrope.loaded.runner.forward.model.model.rotary_emb.forward)
    for half in (rotary._short, rotary._long):
        half.to("meta")
    x, positions = torch.zeros(1, 1, 1, device="meta"), torch.zeros(1, 5, dtype=torch.int64, device="meta")
    rotary._long_tokens.flags = torch.zeros(5, dtype=torch.bool, device="meta")
    cos, sin = rotary(x, positions)
    assert cos.shape == sin.shape == (1, 5, 16)
