"""Rows that begin with the same blocks: that they do reaches the kernel, and what they give is within the margin."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from executor_svc.model import attention, forward
from executor_svc.model.step_columns import step_tensors
from kernels import REFERENCE, Rows, Rule, SharedBlocks
from kernels.cpu import supported
from tests.margin import assert_drawn, assert_logprobs, reference_logits
from tests.model.conftest import MAX_ROWS, Model, random_ids
from tests.model.driver import Driver
from tests.model.test_margin import assert_margin, drawn, greedy
from tests.tiny_models import CONFIGS

BLOCK_SIZE = 16  # what native kernels serve
NUM_BLOCKS = 4  # in common
NUM_OUTPUTS = 6
LEVELS = ["reference", *supported()]
KERNELS = [(family, "auto") for family in CONFIGS] + [("llama", "reference")]
OTHERS = [(family, level) for family in CONFIGS for level in LEVELS if (family, level) not in KERNELS]


@pytest.fixture(
    scope="module",
    params=[*KERNELS, *(pytest.param(other, marks=pytest.mark.slow) for other in OTHERS)],
    ids=lambda param: "-".join(param),
)
def model(request, tiny_directories):
    family, kernels = request.param
    return Model(tiny_directories[family], block_size=BLOCK_SIZE, num_blocks=200, cpu_kernels=kernels)


def driver_of(model) -> Driver:
    return Driver(model.loaded, MAX_ROWS, min_saved_tokens=4)


@pytest.fixture
def handed(monkeypatch):
    """What the layers are told of shared blocks, step by step: (first, end, rows of the step) each."""
    steps = []

    def spy(columns):
        tensors = step_tensors(columns)
        steps.append([] if tensors.rows.shared is None else segments(tensors.rows.shared))
        return tensors

    monkeypatch.setattr(forward, "step_tensors", spy)
    return steps


def segments(shared: SharedBlocks) -> list[tuple[int, int, list[int]]]:
    assert all(column.dtype == torch.int32 for column in vars(shared).values() if isinstance(column, torch.Tensor))
    starts = shared.row_start.tolist()
    rows = [shared.rows[begin:end].tolist() for begin, end in itertools.pairwise(starts)]
    return list(zip(shared.first.tolist(), shared.end.tolist(), rows, strict=True))


def test_a_layer_tells_the_kernel_what_is_shared():
    told = []
    backend = dataclasses.replace(
        REFERENCE, write_kv=lambda *_: None, paged_attention=lambda *call: told.append(call[-2:])
    )
    none, rule = torch.empty(0), Rule(0.5)
    rows = Rows(none, none, none, SharedBlocks(*[none] * 5))
    current = attention.CurrentStep()
    current.tensors = attention.StepTensors(none, rows)
    attention.PagedLayer(backend, none, none, current, None).attend(none, none, none, rule)
    assert told == [(rows, rule)]


def test_a_layers_rule_is_made_once_while_its_model_hands_over_the_same():
    none, sinks = torch.empty(0), torch.ones(2, dtype=torch.bfloat16)
    layer = attention.PagedLayer(REFERENCE, none, none, attention.CurrentStep(), 7)
    rule = layer.rule(0.5, None, sinks)
    assert layer.rule(0.5, None, sinks) is rule
    assert rule.exact_sinks is rule.exact_sinks
    assert (rule.window, rule.exact_sinks.dtype) == (7, torch.float32)
    for other in ((0.25, None, sinks), (0.5, 2.0, sinks), (0.5, None, sinks.clone()), (0.5, None, None)):
        made = layer.rule(*other)
        assert (made.scale, made.soft_cap, made.window) == (*other[:2], 7)
        assert made.sinks is other[2]


def test_a_prefix_in_common_is_a_segment_until_one_row_is_left(model, handed):
    driver = driver_of(model)
    prefix = random_ids(1, NUM_BLOCKS * BLOCK_SIZE)
    first = greedy(prefix + random_ids(2, 3))
    rows = [driver.start(first)]
    driver.step()
    others = [greedy(prefix + random_ids(i, 2)) for i in range(3, 6)]
    rows += [driver.start(other, shared_from=first, num_shared=len(prefix)) for other in others]
    driver.step()  # the others compute two tokens each
    assert handed == [[], []]
    while rows:
        driver.step()
        if len(rows) > 1:
            assert handed[-1] == [(0, NUM_BLOCKS, list(range(len(rows))))]
        else:
            assert handed[-1] == []
        if len(driver.sequences[rows[0]].outputs) >= NUM_OUTPUTS:
            driver.end(rows.pop(0))
    for sequence in (first, *others):
        assert_margin(model, sequence, num_outputs=len(sequence.outputs))


def test_samples_of_a_prompt_share_it_and_draw_apart(model, handed):
    driver = driver_of(model)
    first = drawn(random_ids(3, NUM_BLOCKS * BLOCK_SIZE + 2), seed=11, index=0)
    row = driver.start(first)
    driver.step()
    driver.step()
    rows = [row, *(driver.fork(row, drawn([0], seed=11, index=i).sampling) for i in (1, 2, 3))]
    sequences = [driver.sequences[r] for r in rows]
    for sequence in sequences[1:]:
        sequence.logprobs = list(first.logprobs)
    driver.run(rows, NUM_OUTPUTS + 2)
    assert handed[2:] == [[(0, NUM_BLOCKS, [0, 1, 2, 3])]] * (NUM_OUTPUTS)
    assert_margin(model, first, num_outputs=NUM_OUTPUTS + 2)
    for sequence in sequences[1:]:
        logits = reference_logits(model.reference, sequence.token_ids)
        assert_logprobs(logits, sequence.token_ids, sequence.num_prompt, sequence.logprobs)
        assert_drawn(logits, sequence.token_ids, sequence.num_prompt + 2, sequence.sampling)


def test_beams_share_with_each_other_what_they_have_drawn_together(model, handed):
    """As beams do: now and then some rows end, and others go on twice."""
    driver = driver_of(model)
    row = driver.start(drawn(random_ids(4, NUM_BLOCKS * BLOCK_SIZE), seed=5, index=0))
    driver.step()
    rows = [row, *(driver.fork(row, drawn([0], seed=5, index=i).sampling) for i in (1, 2, 3))]
    choices = np.random.default_rng(0)
    for number in range(4, 52):
        driver.step()
        if number % 4:
            continue
        parent, victim = choices.choice(4, 2, replace=False)
        driver.end(rows[victim])
        rows[victim] = driver.fork(rows[parent], drawn([0], seed=5, index=number).sampling)
    driver.step()
    assert handed[2] == [(0, NUM_BLOCKS, [0, 1, 2, 3])]
    assert max(len(step) for step in handed) > 1  # some share more than others
    assert max(end for step in handed for _, end, _ in step) > NUM_BLOCKS
    for beam in rows:
        sequence = driver.sequences[beam]
        logits = reference_logits(model.reference, sequence.token_ids)
        assert_drawn(logits, sequence.token_ids, len(sequence.token_ids) - 1, sequence.sampling)


def test_what_a_window_hides_of_a_shared_prefix_stays_hidden(model, handed):
    """The prefix is longer than the window of any layer that has one."""
    driver = driver_of(model)
    prefix = random_ids(1, NUM_BLOCKS * BLOCK_SIZE)
    first = greedy(prefix + random_ids(2, 1))
    row = driver.start(first)
    driver.step()
    others = [greedy(prefix + random_ids(i, 1 + 5 * i)) for i in range(3)]
    rows = [driver.start(other, shared_from=first, num_shared=len(prefix)) for other in others]
    driver.run([row, *rows], NUM_OUTPUTS, chunk=4)
    assert [(0, NUM_BLOCKS, [0, 1, 2, 3])] in handed
    assert_margin(model, first, *others, num_outputs=NUM_OUTPUTS)
