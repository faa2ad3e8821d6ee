"""What a step takes beside weights and KV memory: measured on a GPU, by running the largest one."""

import gc
from collections.abc import Callable

import structlog
import torch

from executor_svc.model.decode_graphs import recordings
from executor_svc.model.device import refusing_out_of_memory
from executor_svc.model.made_steps import MadeStep, everything, largest_step, make_step
from executor_svc.model.runner import ModelRunner

log = structlog.get_logger(__name__)

GRAPH_BYTES = 16 << 20  # kept by the driver for each recorded size; nobody tells before it is recorded
LOWER = "lower tokens_per_step or max_rows"

MakeRunner = Callable[[int], ModelRunner]
"""Gives a runner over KV memory of so many blocks, which is freed with it."""


def measure_step_bytes(
    make_runner: MakeRunner,
    device: torch.device,
    *,
    block_size: int,
    max_rows: int,
    tokens_per_step: int,
    max_model_len: int,
    cuda_graphs: bool,
) -> int:
    """The most that a step takes: as many rows and tokens as there can be, and everything that sampling can do.

    With `cuda_graphs` also what recorded decode steps will hold: as much again as a decode step of all rows takes, for
    they work in memory of their own, and GRAPH_BYTES for each size. Raises ModelRefused where not even that fits.
    """
    largest = largest_step(max_rows, tokens_per_step, max_model_len)
    num_blocks = 2 + max_rows + -(-sum(largest) // block_size)
    with refusing_out_of_memory("the largest step", device, needed=None, lower=LOWER):
        runner = make_runner(num_blocks)
        fullest = make_step(largest, block_size, sampling=everything, num_blocks=num_blocks)
        step_bytes = _peak_bytes(fullest, runner, device)
        decode_bytes = _peak_bytes(make_step([1] * max_rows, block_size, num_blocks=num_blocks), runner, device)
    del runner
    _give_back()
    graph_bytes = decode_bytes + GRAPH_BYTES * len(recordings(max_rows)) if cuda_graphs else 0
    log.info("step_measured", tokens=sum(largest), rows=max_rows, step_bytes=step_bytes, graph_bytes=graph_bytes)
    return step_bytes + graph_bytes


def _peak_bytes(made: MadeStep, runner: ModelRunner, device: torch.device) -> int:
    """What torch takes from the device for the step, whether or not it uses all of it or gives it back afterwards."""
    _give_back()
    torch.cuda.reset_peak_memory_stats(device)
    held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    made.run(runner)
    torch.cuda.synchronize(device)
    taken = torch.cuda.max_memory_reserved(device) - held
    return max(taken, torch.cuda.max_memory_allocated(device) - used)


def _give_back() -> None:
    gc.collect()
    torch.cuda.empty_cache()
