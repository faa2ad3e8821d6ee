"""Each layer's queries see what its window says, to the token: found by changing one slot at a time."""

import dataclasses

import numpy as np
import pytest
import torch

from executor_svc.model import attention
from tests.model.conftest import BLOCK_SIZE, MAX_ROWS, Model, random_ids
from tests.model.driver import Driver
from tests.model.families import LOCAL_GLOBAL, LOCAL_LOCAL_LOCAL_GLOBAL, SERVED, tiny_config
from tests.model.test_margin import assert_margin, drawn, greedy
from tests.tiny_models import WINDOW, save_model

# What each layer of a family in `families.SERVED` sees: the last so many tokens, or all.
WINDOWS = {
    "afmoe": [WINDOW, None],
    "beam": [WINDOW, None],
    "cohere2": [WINDOW, None],
    "cohere2_moe": [WINDOW, None],
    "cwm": [WINDOW, None],
    "exaone4": [WINDOW, None],
    "exaone_moe": [WINDOW, None],
    "gemma2": [WINDOW, None],
    "gemma3": [WINDOW, WINDOW, WINDOW, None],
    "gemma3_text": [WINDOW, WINDOW, WINDOW, None],
    "gemma4": [WINDOW, None, WINDOW, None],
    "gemma4_text": [WINDOW, None, WINDOW, None],
    "gpt_oss": [WINDOW, None],
    "granite_swa": [None, WINDOW],
    "granitemoe_swa": [None, WINDOW],
    "kolibri1": [WINDOW, WINDOW],
    "laguna": [WINDOW, None],
    "llama": [None, None],
    "mellum": [WINDOW, None],
    "mimo_v2_flash": [None, WINDOW],
    "ministral": [WINDOW, None],
    "mistral": [WINDOW, WINDOW],
    "modernbert-decoder": [WINDOW, None],  # half of what it calls its local attention
    "olmo3": [WINDOW, None],
    "phi3": [WINDOW, WINDOW],
    "phimoe": [WINDOW, WINDOW],
    "qwen2": [None, WINDOW],
    "starcoder2": [WINDOW, WINDOW],
    "vaultgemma": [WINDOW, None],
}


class Recording:
    """A runner that keeps the step it launched last."""

    def __init__(self, runner) -> None:
        self._runner = runner
        self.step = None

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def launch(self, step):
        self.step = step
        return self._runner.launch(step)


@pytest.fixture
def attached(monkeypatch) -> dict[torch.nn.Module, attention.PagedLayer]:
    """The attention layers of what is loaded, in order, with what was attached to each last."""
    layers, attach = {}, attention.attach
    monkeypatch.setattr(attention, "attach", lambda *pair: (layers.update([pair]), attach(*pair)))
    return layers


def seen_by(runner, module, layer, step, table: list[int]) -> list[set[int]]:
    """For each query of the step, which earlier positions' slots change what the layer attends to: the step is run,
    then the layer alone, again and again, with what it was given in there."""
    given, outputs, caches = [], [], (layer.key_cache, layer.value_cache)
    hooks = [
        module.register_forward_pre_hook(lambda *call: given.append((*call[1:], layer.step.tensors)), with_kwargs=True),
        module.register_forward_hook(lambda *call: outputs.append(call[2][0][0])),
    ]
    runner.launch(step).result()
    for hook in hooks:
        hook.remove()
    (arguments, named, tensors), (before,) = given[0], outputs

    @torch.inference_mode()
    def attended() -> torch.Tensor:
        layer.step.tensors = tensors
        try:
            return module(*arguments, **named)[0][0]
        finally:
            layer.step.tensors = None

    assert torch.equal(attended(), before)
    first = int(step.positions[0])
    seen = [set() for _ in step.positions]
    for position in range(first):
        block, offset = table[position // BLOCK_SIZE], position % BLOCK_SIZE
        kept = [cache[block, offset].clone() for cache in caches]
        for cache in caches:
            cache[block, offset] = 1 - 2 * cache[block, offset]
        after = attended()
        for cache, value in zip(caches, kept, strict=True):
            cache[block, offset] = value
        for query in (before != after).any(-1).nonzero()[:, 0].tolist():
            seen[query].add(position)
    return seen


@pytest.mark.parametrize("family", WINDOWS)
def test_a_query_sees_exactly_the_last_tokens_of_its_layers_window(family, attached, tmp_path):
    model = Model(save_model(tmp_path, tiny_config(family, SERVED[family])))
    runner = Recording(model.loaded.runner)
    driver = Driver(dataclasses.replace(model.loaded, runner=runner), MAX_ROWS)
    sequence = greedy(random_ids(1, 3 * WINDOW + 2))
    driver.start(sequence)
    steps = []
    for chunk in (WINDOW + 1, WINDOW - 1, WINDOW + 2, 1, 1, 1):  # parts that cross windows and blocks, then decoding
        driver.step(chunk)
        ids = np.array(sequence.token_ids, np.int32)  # all known by now, so that the step can be run again
        steps.append(dataclasses.replace(runner.step, token_ids=ids[runner.step.positions]))
    assert [len(step.positions) for step in steps] == [9, 7, 10, 1, 1, 1]
    for (module, layer), window in zip(attached.items(), WINDOWS[family], strict=True):
        for step in steps[1:]:
            first = int(step.positions[0])
            expected = [
                set(range(0 if window is None else max(0, position - window + 1), first))
                for position in step.positions.tolist()
            ]
            assert seen_by(model.loaded.runner, module, layer, step, sequence.table) == expected


@pytest.mark.parametrize("pattern", [LOCAL_LOCAL_LOCAL_GLOBAL, LOCAL_GLOBAL], ids=["LLLG", "LG"])
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gpt_oss"])
def test_local_and_full_layers_with_and_without_a_cached_prefix(family, pattern, tmp_path):
    changes = SERVED[family] | {"layer_types": pattern, "num_hidden_layers": len(pattern)}
    model = Model(save_model(tmp_path, tiny_config(family, changes)))
    driver = Driver(model.loaded, MAX_ROWS)
    for length in (WINDOW - 2, WINDOW, WINDOW + 1, 60):
        prompt = random_ids(length, length)
        cold, warm = greedy(prompt), drawn(prompt, seed=length)
        row = driver.start(cold)
        driver.step()
        shared = (length - 1) // BLOCK_SIZE * BLOCK_SIZE  # a hit never covers the last token
        rows = [row, driver.start(warm, shared_from=cold, num_shared=shared)]
        driver.run(rows, WINDOW + 2)
        assert_margin(model, cold, warm, num_outputs=WINDOW + 2)


def test_gemma3_turns_local_and_full_layers_by_bases_of_their_own():
    parameters = tiny_config("gemma3_text", SERVED["gemma3_text"]).rope_parameters
    bases = {kind: parameters[kind]["rope_theta"] for kind in LOCAL_GLOBAL}
    assert bases["sliding_attention"] != bases["full_attention"]  # or the test above would not see them mixed up
