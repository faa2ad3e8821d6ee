"""What a runner does where memory ends, and how much of a GPU it may take."""

from dataclasses import replace

import pytest
import torch

from executor_svc.model.free_memory import outside_share
from executor_svc.model.made_steps import make_step
from executor_svc.model.memory import choose_num_blocks
from executor_svc.model.refusal import ModelRefused
from executor_svc.model.runner import StepOutOfMemory
from kernels.cpu import linear, supported
from tests.model.conftest import BLOCK_SIZE, Model
from tests.model.driver import Driver, Sequence, row_sampling

GPU = torch.device("cuda", 0)


@pytest.mark.skipif(
    not linear.is_native((*supported(), None)[0], torch.bfloat16), reason="no native kernels for this CPU"
)
def test_the_last_mlp_is_for_tokens_that_somebody_samples_from(tiny_directories, monkeypatch):
    driver = Driver(Model(tiny_directories["llama"], torch.bfloat16).loaded, 2)
    num_tokens, own = [], linear.gated
    monkeypatch.setattr(linear, "gated", lambda x, *rest: num_tokens.append(x.shape[-2]) or own(x, *rest))
    for first_id in (1, 2):
        driver.start(Sequence(list(range(first_id, first_id + 20)), 20, row_sampling()))
    for chunk in (12, 8, 1):
        driver.step(chunk)
    assert num_tokens == [24, 1, 16, 2, 2, 2]  # of two layers; a step from which nobody samples goes on with one token


@pytest.mark.skipif(not supported(), reason="no native kernels for this CPU")
def test_memory_of_a_block_is_asked_for_by_the_step_that_is_the_first_to_write_it(tiny_directories, monkeypatch):
    loaded = Model(tiny_directories["llama"], torch.float32).loaded
    driver, runner = Driver(loaded, 2), loaded.runner
    asked, touch = [], runner._backend.touch_blocks

    def noted(caches, blocks):
        asked.append(blocks.tolist())
        touch(caches, blocks)

    runner._memory.unused[:] = True  # warming up has written some
    monkeypatch.setattr(runner, "_backend", replace(runner._backend, touch_blocks=noted))
    for first_id in (1, 2):
        driver.start(Sequence(list(range(first_id, first_id + 5 * BLOCK_SIZE)), 5 * BLOCK_SIZE, row_sampling()))
    asked_by_steps = []
    for chunk in (5 * BLOCK_SIZE, *[1] * (BLOCK_SIZE + 1)):
        asked.clear()
        driver.step(chunk)
        asked_by_steps.append([block for blocks in asked for block in blocks])
    tables = [sequence.table for sequence in driver.sequences.values()]
    assert [set(blocks) for blocks in asked_by_steps] == [
        {block for table in tables for block in table[:5]},
        {table[5] for table in tables},
        *[set()] * (BLOCK_SIZE - 1),
        {table[6] for table in tables},
    ]
    assert sum(map(len, asked_by_steps)) == 14  # none twice


def test_a_step_that_runs_out_of_memory_says_what_to_lower(llama, monkeypatch):
    runner = llama.loaded.runner

    def exhausted(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(runner.forward, "logits", exhausted)
    sentence = "3 rows and 9 tokens ran out of memory; lower tokens_per_step, max_rows or memory_share.*2.00 GiB"
    with pytest.raises(StepOutOfMemory, match=sentence):
        make_step([4, 4, 1], BLOCK_SIZE).run(runner)
    runner.reset()


@pytest.mark.parametrize(
    ("free", "share", "blocks"),
    [(1000, 1.0, 80), (1000, 0.9, 70), (600, 0.9, 30), (400, 0.9, 10)],
    ids=["all", "nine tenths", "others hold 400", "others hold 600"],
)
def test_what_others_hold_of_a_gpu_counts_as_part_of_the_share(monkeypatch, free, share, blocks):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1000))
    reserved = 200 + outside_share(GPU, share)
    assert choose_num_blocks(10, reserved, GPU, num_blocks=None, kv_bytes=None, most_blocks=999) == blocks


def test_a_share_that_others_have_used_up_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (90, 1000))
    with pytest.raises(ModelRefused, match="90 bytes are available on cuda:0, of which 100 are kept"):
        choose_num_blocks(10, outside_share(GPU, 0.9), GPU, num_blocks=None, kv_bytes=None, most_blocks=9)
