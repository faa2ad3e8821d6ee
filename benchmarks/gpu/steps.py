"""Whole steps of a model: tokens a second with and without CUDA graphs, what the host takes, and prompts."""

import random
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.gpu import models
from benchmarks.gpu.backends import prepare
from benchmarks.gpu.graphs import recorded_graphs, runner_of
from benchmarks.gpu.rows import Rows, greedy, watched_launches
from benchmarks.gpu.sections import Machine, Report
from benchmarks.gpu.timing import significant, take_turns
from executor_svc.loaded import LoadedModel
from executor_svc.model.decode_graphs import DecodeGraphs

NUM_ROWS, TINY_NUM_ROWS = (1, 8, 64, 256), (1, 3)
CONTEXT, TINY_CONTEXT = 512, 12
STEPS, TINY_STEPS = 30, 3  # of each kind
WARM_STEPS = 4
PREFILL, TINY_PREFILL = (4, 2048), (2, 20)  # rows, tokens of each
TOKENS_PER_STEP = 8192
PREFILL_REPEATS = 4
MATMUL = 8192
KV_SHARE = 0.5  # of the memory that is free


def measure(machine: Machine, report: Report) -> None:
    device = torch.device(machine.device)
    prepare(device)
    config = models.qwen3_config(machine.layers, tiny=machine.tiny)
    sizes = TINY_NUM_ROWS if machine.tiny else NUM_ROWS
    dtype = torch.float32 if machine.tiny else torch.bfloat16
    with tempfile.TemporaryDirectory() as name:
        began = time.monotonic()
        directory = models.save(config, Path(name), dtype, device)
        saved = time.monotonic()
        loaded = models.loaded(
            directory, device, "auto",
            max_rows=max(sizes), max_model_len=2 * (TINY_PREFILL if machine.tiny else PREFILL)[1],
            tokens_per_step=TOKENS_PER_STEP, kv_memory=_kv_bytes(config, device, max(sizes), machine),
        )  # fmt: skip
        report.add(layers=machine.layers, make_s=round(saved - began, 2), load_s=round(time.monotonic() - saved, 2))
    report.attempt("prefill", lambda: prefill(loaded, machine))
    graphs = recorded_graphs(loaded)
    for num_rows in sizes:
        if num_rows * _row_blocks(loaded, machine) < loaded.num_blocks:
            report.attempt(f"decode_{num_rows}", partial(decode, loaded, graphs, num_rows, machine))
        else:
            report.add(**{f"decode_{num_rows}": "no memory"})


def _row_tokens(machine: Machine) -> int:
    return TINY_CONTEXT + 40 if machine.tiny else CONTEXT + 2 * (STEPS + WARM_STEPS) + 16


def _row_blocks(loaded: LoadedModel, machine: Machine) -> int:
    return -(-_row_tokens(machine) // loaded.facts.block_size)


def _kv_bytes(config: Any, device: torch.device, num_rows: int, machine: Machine) -> int:
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    needed = (num_rows + 1) * _row_tokens(machine) * token_bytes
    return needed if device.type != "cuda" else min(needed, int(KV_SHARE * torch.cuda.mem_get_info(device)[0]))


def decode(loaded: LoadedModel, graphs: DecodeGraphs, num_rows: int, machine: Machine) -> dict[str, float]:
    """Steps with and without graphs take turns, on the same rows. Milliseconds are from launch to result;
    `host_ms` are of the launch, until the device has been given everything."""
    runner = runner_of(loaded)
    rows = _begun(loaded, num_rows, TINY_CONTEXT if machine.tiny else CONTEXT)
    everyone = list(range(num_rows))
    whole: dict[bool, list[float]] = {False: [], True: []}
    host: dict[bool, list[float]] = {False: [], True: []}
    num_steps = TINY_STEPS if machine.tiny else STEPS
    for i in range(2 * (WARM_STEPS + num_steps)):
        with_graphs = bool(i % 2)
        runner.graphs = graphs if with_graphs else None
        step = rows.step(everyone)
        with watched_launches(runner) as launches:
            began = time.perf_counter()
            output = runner.launch(step).result()
            elapsed = time.perf_counter() - began
        rows.take(step, output)
        if i >= 2 * WARM_STEPS:
            whole[with_graphs].append(elapsed)
            host[with_graphs].append(launches[0])
    figures = {}
    for with_graphs, label in ((True, "graphs"), (False, "alone")):
        figures[f"{label}_tokens_s"] = significant(num_rows / median(whole[with_graphs]))
        figures[f"{label}_step_ms"] = significant(1e3 * median(whole[with_graphs]))
        figures[f"{label}_host_ms"] = significant(1e3 * median(host[with_graphs]))
    figures["alone_by_graphs"] = significant(median(a / b for a, b in zip(whole[False], whole[True], strict=True)))
    return figures


def _begun(loaded: LoadedModel, num_rows: int, context: int) -> Rows:
    """Rows that have computed their prompts, in steps of a bounded number of tokens."""
    chance = random.Random(0)
    rows = Rows(runner_of(loaded), loaded.num_blocks, loaded.facts.block_size)
    for _ in range(num_rows):
        rows.begin([chance.randrange(loaded.facts.vocab_size) for _ in range(context)], greedy())
    for some in _slices(list(range(num_rows)), max(1, TOKENS_PER_STEP // context)):
        rows.run(some)
    return rows


def _slices(rows: list[int], size: int) -> Iterator[list[int]]:
    for begin in range(0, len(rows), size):
        yield rows[begin : begin + size]


def prefill(loaded: LoadedModel, machine: Machine) -> dict[str, float]:
    """Whole prompts in one step, beside a square product in the same dtype."""
    num_rows, length = TINY_PREFILL if machine.tiny else PREFILL
    runner = runner_of(loaded)
    model: Any = runner.forward.model
    seconds = []
    for _ in range(1 + PREFILL_REPEATS):
        rows = Rows(runner, loaded.num_blocks, loaded.facts.block_size)
        for i in range(num_rows):
            rows.begin([(i + j) % loaded.facts.vocab_size for j in range(length)], greedy())
        step = rows.step(list(range(num_rows)))
        began = time.perf_counter()
        runner.launch(step).result()
        seconds.append(time.perf_counter() - began)
    elapsed = median(seconds[1:])
    config = model.config
    weights = sum(parameter.numel() for parameter in model.parameters()) - model.get_input_embeddings().weight.numel()
    seen = num_rows * length * (length + 1) / 2
    flop = 2.0 * weights * num_rows * length
    flop += 4.0 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * seen
    matmul = matmul_tflop_s(model.device, model.dtype, 64 if machine.tiny else MATMUL)
    tflop_s = flop / elapsed / 1e12
    return {
        "tokens_s": significant(num_rows * length / elapsed),
        "step_ms": significant(1e3 * elapsed),
        "tflop_s": significant(tflop_s),
        "matmul_tflop_s": significant(matmul),
        "of_matmul": significant(tflop_s / matmul),
    }


def matmul_tflop_s(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """A square product's rate, on random numbers: zeros are faster."""
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    seconds = take_turns({"matmul": [lambda: a @ b]}, 10, device)["matmul"]
    return 2.0 * size**3 / median(seconds) / 1e12
