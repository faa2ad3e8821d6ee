"""One of the processes that serve models together, one model after another; started by `test_parallel`.

`python -m tests.model.parallel_rank KIND:DIRECTORY...` with torchrun's variables; a kind is a type, or `int8` for
bfloat16 with weights, keys and values in 8 bits. Rank 0 drives each model and judges what comes of it; it ends with a
traceback where a model is served wrong.
"""

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed.distributed_c10d as c10d
from transformers import PreTrainedModel

from executor_svc.model.load import load_share
from executor_svc.model.parallel.shares import SummedLinear
from executor_svc.ranks import Ranks
from kernels.cpu.linear import is_native
from tests.margin import reference_logits, reference_model
from tests.model.conftest import MAX_ROWS, Model, random_ids, settings_for
from tests.model.driver import Driver, Sequence, row_sampling
from tests.model.test_families import BLOCK_SIZE, NUM_OUTPUTS, SITUATIONS
from tests.model.test_margin import assert_margin, greedy
from tests.model.test_prompt_logprobs import assert_as_transformers, entries_of, scored
from tests.tiny_models import VOCAB_SIZE

# In bf16, how much farther from fp32 than transformers in one process. Activations are rounded where it rounds them,
# and sums of shares once, so the distance is the same but for chance; torch's own products round each share besides.
FARTHER, FARTHER_WITHOUT_NATIVE_PRODUCTS = 1.05, 1.15
# In 8 bits, how much farther than one process: each share of a row of activations has a scale of its own.
FARTHER_IN_8_BITS = 1.1
IN_8_BITS = {"int8_weights": True, "int8_kv": True}


def main() -> None:
    c10d._object_to_tensor = c10d._tensor_to_object = refuse_pickle
    started = Ranks.of_environment(os.environ)
    for number, argument in enumerate(sys.argv[1:]):
        kind, _, directory = argument.partition(":")
        dtype, in_8_bits = ("bfloat16", IN_8_BITS) if kind == "int8" else (kind, {})
        settings = {"block_size": BLOCK_SIZE, **in_8_bits}
        ranks = replace(started, attempt=number)
        if ranks.rank:
            load_share(settings_for(directory, dtype=dtype, num_blocks=500, **settings), ranks).follow()
            continue
        alone = Model(directory, getattr(torch, dtype), **settings) if in_8_bits else None
        model = Model(directory, getattr(torch, dtype), ranks, **settings)
        assert model.loaded.num_blocks == 500, "what the rank with the least has"
        try:
            if directory.endswith("llama"):
                assert_plain(model.loaded.runner._own.forward.model)
            if dtype == "float32":
                judge(model)
            elif alone is not None:
                judge_8_bits(model, alone)
            else:
                judge_rounding(model)
        except AssertionError as error:
            error.add_note(argument)
            raise
        model.loaded.close()


def judge(model: Model) -> None:
    for situation, run in SITUATIONS.items():
        try:
            assert_margin(model, *run(model), num_outputs=NUM_OUTPUTS)
        except AssertionError as error:
            error.add_note(situation)
            raise
    driver = Driver(model.loaded, MAX_ROWS)
    prompts = [random_ids(length, length) for length in (2, 9, 17)]
    rows = [driver.start(scored(prompt)) for prompt in prompts]
    for row, prompt in zip(rows, prompts, strict=True):
        driver.sequences[row].num_prompt = len(prompt)
    entries = entries_of(driver, rows, 5)
    for row, prompt in zip(rows, prompts, strict=True):
        assert_as_transformers(model.reference, prompt, entries[row])
    sequence = greedy(random_ids(12, 9))
    parent = driver.start(sequence)
    driver.step()
    child = driver.fork(parent, row_sampling(temperature=1.0, seed=5, index=1, logprobs=2))
    fork = driver.sequences[child]
    driver.run([parent, child], NUM_OUTPUTS)
    assert_margin(model, sequence, num_outputs=NUM_OUTPUTS)
    assert len(fork.outputs) == NUM_OUTPUTS


def judge_rounding(model: Model) -> None:
    """All log-probabilities of a few prompts, beside transformers' in fp32: as near as transformers' in 16 bits are."""
    exact = reference_model(model.reference.name_or_path)
    of_served = distance(exact, lambda prompt: served_logprobs(model, prompt))
    of_own = distance(exact, lambda prompt: logprobs_of(model.reference, prompt))
    level = model.loaded.runner._own._backend.level
    native = level is not None and is_native(level, torch.bfloat16)
    assert of_served <= of_own * (FARTHER if native else FARTHER_WITHOUT_NATIVE_PRODUCTS)


def judge_8_bits(model: Model, alone: Model) -> None:
    """The same, beside one process with the same settings."""
    exact = reference_model(model.reference.name_or_path)
    of_served, of_alone = (
        distance(exact, lambda prompt, one=one: served_logprobs(one, prompt)) for one in (model, alone)
    )
    of_rounded = distance(exact, lambda prompt: logprobs_of(model.reference, prompt))
    assert of_rounded < of_served <= of_alone * FARTHER_IN_8_BITS


def distance(exact: PreTrainedModel, logprobs: Callable[[list[int]], torch.Tensor]) -> float:
    prompts = [random_ids(seed, 24) for seed in range(6)]
    errors = [logprobs(prompt) - logprobs_of(exact, prompt) for prompt in prompts]
    return float(torch.cat(errors).square().mean().sqrt())


def logprobs_of(reference: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    return torch.log_softmax(reference_logits(reference, prompt).double(), -1)[:-1]


def served_logprobs(model: Model, prompt: list[int]) -> torch.Tensor:
    driver = Driver(model.loaded, MAX_ROWS)
    driver.start(Sequence(list(prompt), len(prompt), row_sampling(prompt_logprobs=VOCAB_SIZE)))
    driver.step()
    columns = driver.prompt_logprobs
    ids, values = (torch.from_numpy(column).view(len(prompt) - 1, -1) for column in (columns.ids, columns.values))
    return torch.zeros(len(ids), VOCAB_SIZE, dtype=torch.float64).scatter_(1, ids.long(), values.double())


def assert_plain(model: torch.nn.Module) -> None:
    """All its layers are ordinary ones, of half the heads and half the width. (Their weights may be packed by now.)"""
    layer = model.model.layers[0]
    assert {type(parameter) for parameter in model.model.layers.parameters()} == {torch.nn.Parameter}
    assert isinstance(layer.mlp.down_proj, SummedLinear)
    assert layer.self_attn.k_proj.out_features == 16
    assert "tp_forward" not in str(vars(layer.self_attn.k_proj).get("forward"))


def refuse_pickle(*_: object) -> None:
    raise AssertionError("objects were exchanged as pickles")


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # noqa: BLE001 - told and passed on as the exit code
        traceback.print_exc()  # torch's own way of telling puts the rank before each line, once more for each model
        sys.stderr.flush()
        os._exit(1)
