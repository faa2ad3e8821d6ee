"""Between the begin of a step and the reading of its results the host asks the device nothing and sends it one copy.

Shown on the device "meta", whose tensors have no values: whoever asks for one is refused. A second look watches every
operation for tensors of the host among those of the device.
"""

import contextlib
import dataclasses
import functools
import itertools

import numpy as np
import pytest
import torch
import transformers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor_svc.model import attention, rotary
from executor_svc.model.memory import KVMemory
from executor_svc.model.proof import prove
from executor_svc.model.runner import ModelRunner
from executor_svc.model.sampler import Sampler
from executor_svc.model.staging import Staging
from executor_svc.step import Masks, RowStart, Scored, SharedSegments, Step, mask_bytes
from kernels import REFERENCE, Backend
from kernels.attention import check_attention
from kernels.checks import check_write
from tests.model.driver import row_sampling
from tests.model.families import SERVED, tiny_config
from tests.rules import rule_columns
from tests.tiny_models import CONFIGS, TINY_DECODER, VOCAB_SIZE

META = torch.device("meta")
BLOCK_SIZE, MAX_ROWS = 4, 8
NONE = np.empty(0, np.int32)


class _MixedOperations(TorchDispatchMode):
    def __init__(self, names):
        super().__init__()
        self._names = names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        if len({tensor.device.type for tensor in tensors}) > 1:
            self._names.append(str(func))
        return result


class _HostValues(TorchFunctionMode):
    def __init__(self, names):
        super().__init__()
        self._names = names

    def __torch_function__(self, func, types, args=(), kwargs=None):
        index = args[1] if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) else ()
        lists = [part for part in (index if isinstance(index, tuple) else (index,)) if isinstance(part, list)]
        if lists or func in (torch.tensor, torch.as_tensor):
            self._names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Crossings:
    """Notes what brings values of the host to the device: operations with tensors of both among their arguments and
    results, tensors made of lists, and lists as an index."""

    def __init__(self):
        self.names = []
        self._modes = contextlib.ExitStack()

    def __enter__(self):
        self._modes.enter_context(_HostValues(self.names))
        self._modes.enter_context(_MixedOperations(self.names))
        return self

    def __exit__(self, *error):
        self._modes.close()


ON = {
    "temperature": {"temperature": 0.9, "seed": 3},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "rules": rule_columns(bias={3: 2.0, 5: -1.0}, allowed=[3, 5, 7, 9], banned=[[3], [4, 5], [1, 2, 7]]),
    "min_tokens": {"min_tokens": 9, "end_token_ids": [5, 9]},
    "logprobs": {"logprobs": 3},
}
# One or two of them, all but one or two: what two do to each other shows among few and among many.
FEW_OR_MOST, HALF = (0, 1, 2, 6, 7, 8), (3, 4, 5)


def combinations(sizes: tuple[int, ...]) -> list[dict]:
    """Parameters of all choices of so many of ON."""
    chosen = [parts for size in sizes for parts in itertools.combinations(ON, size)]
    return [{name: value for part in parts for name, value in ON[part].items()} for parts in chosen]


@pytest.mark.parametrize(
    "sizes", [FEW_OR_MOST, pytest.param(HALF, marks=pytest.mark.slow)], ids=["few or most", "half"]
)
@pytest.mark.parametrize("masked", [False, True], ids=["", "some rows masked"])
@pytest.mark.parametrize("mixed", [False, True], ids=["all rows", "every second row"])
def test_sampling_asks_the_device_nothing_whatever_the_rows_want(mixed, masked, sizes):
    masks = Masks(np.array([1, 3], np.int32), np.full((2, mask_bytes(VOCAB_SIZE)), 5, np.uint8)) if masked else None
    rows, ids = np.arange(4, dtype=np.int32), np.arange(6, dtype=np.int32)
    for parameters in combinations(sizes):
        sampling = [row_sampling(**parameters if i % 2 or not mixed else {}) for i in rows]
        sampler = Sampler(VOCAB_SIZE, META)
        sampler.start_rows([RowStart(i, ids, 4, sampling[i]) for i in rows.tolist()])
        logits = torch.empty(4, VOCAB_SIZE + 8, device=META, dtype=torch.bfloat16)
        plan = sampler.plan(rows, np.full(4, 6, np.int32), masks)
        columns = Staging(META).to_device(plan.columns)
        with Crossings() as crossings:
            drawn, logprobs = sampler.launch(logits, plan, columns)
        assert crossings.names == [], parameters
        assert (drawn.shape, drawn.dtype) == ((4,), torch.int64)
        assert (logprobs is not None) == ("logprobs" in parameters)


def attend(q, keys, values, rows, rule):
    check_attention(q, keys, values, rows, rule)
    if (shared := rows.shared) is not None:
        assert [len(column) for column in shared.by_row] == [len(shared.rows), len(rows) + 1]
    return q.new_empty(*q.shape[:2], values.shape[3])


def copy(caches, source, destination):
    assert source.dtype == destination.dtype == torch.int64
    assert source.device == destination.device == META


def runner_without_values(config, max_rows: int = MAX_ROWS) -> ModelRunner:
    """A whole model and its runner on the device without values; kernels look at their arguments and give nothing."""
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    layers = prove(model, 64)
    switch_len = 5 if "longrope" in str(config) else 0
    long_tokens = rotary.install(model, switch_len)
    model.to(META)
    for module in model.modules():
        if isinstance(module.forward, rotary._Rotary):
            module.forward._short.to(META)
            module.forward._long.to(META)
    backend = Backend("none", attend, check_write, copy, REFERENCE.allocate_caches)
    memory, current = KVMemory.allocate(layers, 64, BLOCK_SIZE, META, backend), attention.CurrentStep()
    attention.register()
    model.set_attn_implementation(attention.ATTENTION_NAME)
    for layer, (keys, values) in zip(layers, memory.layers, strict=True):
        attention.attach(layer.module, attention.PagedLayer(backend, keys, values, current, layer.window))
    return ModelRunner(
        model,
        memory,
        current,
        backend,
        vocab_size=VOCAB_SIZE,
        max_rows=max_rows,
        long_tokens=long_tokens,
        rope_switch_len=switch_len,
    )


def step(tokens: list[int], samples: list[bool], *, copies: int = 0) -> Step:
    num_rows, total = len(tokens), sum(tokens)
    ids = np.arange(total, dtype=np.int32)
    ids[::2] = -1
    return Step(
        rows=np.arange(num_rows, dtype=np.int32),
        query_start=np.cumsum([0, *tokens], dtype=np.int32),
        token_ids=ids,
        positions=np.concatenate([np.arange(n, dtype=np.int32) for n in tokens]),
        slots=np.arange(total, dtype=np.int64),
        block_tables=np.ones((num_rows, 3), np.int32),
        context_lens=np.array(tokens, np.int32),
        samples=np.array(samples),
        copy_sources=np.arange(copies, dtype=np.int32),
        copy_destinations=np.arange(copies, dtype=np.int32),
    )


def scored(made: Step) -> Step:
    """The same for prompts whose log-probabilities are wanted."""
    places = np.arange(len(made.token_ids), dtype=np.int64)
    return dataclasses.replace(made, scored=Scored(places, places.astype(np.int32), np.full(len(places), 3, np.int64)))


def sharing(made: Step) -> Step:
    """The same, with two blocks that the last two rows have in common."""
    rows = np.arange(len(made.rows), dtype=np.int32)
    columns = [0], [2], [0, 2], rows[-2:], np.where(rows < len(rows) - 2, 0, 2)
    return dataclasses.replace(made, shared=SharedSegments(*(np.array(column, np.int32) for column in columns)))


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 5,
    "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
}  # fmt: skip
MODELS = {
    **CONFIGS,
    "longrope": lambda: transformers.LlamaConfig(**TINY_DECODER, rope_parameters=LONGROPE),
    **{name: functools.partial(tiny_config, name, SERVED[name]) for name in ("gpt2", "mixtral", "gpt_oss", "gemma2")},
}
# Their experts ask how many tokens each of them has got; such a model is served without recorded steps.
WAITING = {"jetmoe", "longcat_flash"}


@pytest.mark.parametrize("family", MODELS)
def test_a_step_of_a_model_sends_one_copy_and_asks_nothing(family):
    runner = runner_without_values(MODELS[family]())
    everything = row_sampling(**{name: value for part in ON.values() for name, value in part.items()})
    ids = np.arange(6, dtype=np.int32)
    runner.start_rows([RowStart(i, ids, 4, everything if i % 2 else row_sampling()) for i in range(MAX_ROWS)])
    with Crossings() as crossings:
        runner.record_graphs(lambda work: work() or work, table_width=16)
    graphs = runner.graphs
    assert crossings.names == []
    steps = [step([5, 1, 3], [True, True, False], copies=2), step([4, 2], [False, False]), step([1] * 5, [True] * 5)]
    steps += [scored(step([5, 1, 3], [True, True, False])), scored(step([4, 2], [False, False]))]
    steps += [sharing(step([5, 1, 1], [True, True, False])), sharing(step([1] * 5, [True] * 5))]
    for used, current in [*((None, s) for s in steps), (graphs, steps[2]), (graphs, steps[-1])]:
        runner.graphs = used
        with Crossings() as crossings:
            output = runner.launch(current).output
        assert crossings.names == ["aten.copy_.default"]
        num_sampling = int(current.samples.sum())
        assert (output is None) == (num_sampling == 0 and current.scored is None)
        if output is not None:
            assert output.drawn.shape == (num_sampling,)


@pytest.mark.parametrize("tokens", [None, [7, 8, 9]], ids=["handed on", "replaced"])
def test_forks_send_one_copy_and_ask_nothing_whatever_token_a_child_goes_on_with(tokens):
    runner, ids = runner_without_values(CONFIGS["llama"]()), np.arange(6, dtype=np.int32)
    runner.start_rows([RowStart(i, ids, 4, row_sampling(logprobs=4)) for i in range(2)])
    # A child may be a parent, too, and hands on what it was before.
    parents, children = np.array([0, 1, 0], np.int32), np.array([1, 4, 5], np.int32)
    own = None if tokens is None else np.array(tokens, np.int32)
    with Crossings() as crossings:
        runner.fork_rows(parents, children, [row_sampling(logprobs=4)] * 3, own)
        assert crossings.names == ["aten.copy_.default"]
        forked = dataclasses.replace(step([1] * 4, [True] * 4, copies=3), rows=np.array([0, 1, 4, 5], np.int32))
        output = runner.launch(forked).output
    assert crossings.names == ["aten.copy_.default"] * 2
    assert (output.drawn.shape, output.logprobs.ids.shape) == ((4,), (4, 5))


@pytest.mark.parametrize("family", SERVED)
def test_decode_steps_of_every_family_but_a_few_can_be_recorded(family):
    """Of up to four rows, sharing and not; more are the same to a model, and are recorded above."""
    runner = runner_without_values(tiny_config(family, SERVED[family]), max_rows=4)
    outcome = pytest.raises((NotImplementedError, RuntimeError)) if family in WAITING else contextlib.nullcontext()
    with outcome:
        runner.record_graphs(lambda work: work() or work, table_width=16)


@pytest.mark.parametrize(
    "ask",
    [
        lambda t: t.sum().item(),
        lambda t: t[t > 0],
        lambda t: t.tolist(),
        lambda t: bool(t.any()),
        lambda t: t[[0, 1]],
        lambda t: t * torch.tensor([1.0, 2.0, 3.0], device=META),
        lambda t: t.index_copy_(0, torch.tensor([0]), t[:1]),
        lambda t: t + torch.tensor([1.0, 2.0, 3.0]).to(META),
    ],
)
def test_what_would_wait_is_noticed(ask):
    values = torch.empty(3, device=META)
    try:
        with Crossings() as crossings:
            ask(values)
    except (RuntimeError, NotImplementedError):
        return
    assert crossings.names
