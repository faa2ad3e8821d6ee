"""From the start of a step to the read of its results, the host waits for the device nowhere."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import models
from benchmarks.gpu.backends import prepare
from benchmarks.gpu.graphs import recorded_graphs, runner_of
from benchmarks.gpu.rows import Rows, greedy, watched_launches
from benchmarks.gpu.sections import Machine, Report

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.8, "seed": 2, "top_k": 20},
    {"temperature": 1.2, "seed": 3, "top_p": 0.9},
    {"temperature": 1.2, "seed": 4, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {"temperature": 0.7, "seed": 5, "min_tokens": 8, "end_token_ids": [models.EOS_ID]},
    {"logprobs": 5},
)
DECODE_STEPS = 4


def measure(machine: Machine, report: Report) -> None:
    device = torch.device(machine.device)
    prepare(device)
    config = models.margin_configs(tiny=machine.tiny)["llama"]
    with tempfile.TemporaryDirectory() as name:
        directory = models.save(config, Path(name), torch.float32, device)
        loaded = models.loaded(
            directory, device, "bfloat16", max_rows=len(SAMPLINGS), max_model_len=512, num_blocks=300
        )
    runner, graphs = runner_of(loaded), recorded_graphs(loaded)
    if not waiting_is_seen(device):
        report.fail("torch does not notice a wait in this mode, so that the rest proves nothing")
    for label, used in (("alone", None), ("with_graphs", graphs)):
        runner.graphs = used
        _steps(Rows(runner, loaded.num_blocks, loaded.facts.block_size))  # what compiles or allocates may wait
        with watched_launches(runner, lambda: waiting_raises(device)) as launches:
            _steps(Rows(runner, loaded.num_blocks, loaded.facts.block_size))
        report.add(**{f"launches_{label}": len(launches)})


def _steps(rows: Rows) -> None:
    """Prompts, prompts beside rows that decode, and decode steps of rows that sample in every way."""
    for i, parameters in enumerate(SAMPLINGS):
        rows.begin(list(range(10, 27 + i)), greedy(**parameters))
    everyone = list(range(len(SAMPLINGS)))
    rows.run(everyone[:4])
    rows.run(everyone, most_tokens=9)
    for _ in range(DECODE_STEPS):
        rows.run(everyone)


@contextmanager
def waiting_raises(device: torch.device) -> Iterator[None]:
    """A CPU computes at once, so that there is nothing to wait for."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def waiting_is_seen(device: torch.device) -> bool:
    """Whether a wait that is really there raises. Nothing waits on a CPU."""
    if device.type != "cuda":
        return True
    number = torch.ones((), device=device)
    try:
        with waiting_raises(device):
            number.item()
    except RuntimeError:
        return True
    return False
