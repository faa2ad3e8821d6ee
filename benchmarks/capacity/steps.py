"""The latency of an executor process that serves, from steps of a few shapes."""

from dataclasses import dataclass

import numpy as np

from benchmarks.capacity.latency import StepLatency
from benchmarks.claims.requests import Mix, Source
from benchmarks.claims.served import Executor, Serving, Steps
from benchmarks.claims.watched import WatchedScheduler

# Sequences at once, and tokens of each one's prompt: from one row of no context to full steps of long ones.
SHAPES = ((1, 16), (1, 1024), (4, 256), (8, 1024), (16, 32), (32, 128), (64, 16), (96, 192))
OUTPUT_TOKENS = 12  # decode steps of each shape
MAX_ROWS, TOKENS_PER_STEP, NUM_BLOCKS = 256, 1024, 4096


@dataclass(frozen=True, slots=True)
class Measured:
    """A latency, of how many steps, and how far off it is from them: medians of relative errors, by shape."""

    latency: StepLatency
    num_steps: int
    errors: dict[str, float]


async def measured(flags: list[str], rounds: int = 1) -> Measured:
    """Of an executor that is started with these flags. Each shape is one burst of equal sequences, whose prompts are
    computed in parts and then decode. Raises ServiceFailed and ServingFailed."""
    limits = ("--max-rows", str(MAX_ROWS), "--tokens-per-step", str(TOKENS_PER_STEP), "--num-blocks", str(NUM_BLOCKS))
    by_shape: dict[str, Steps] = {}
    async with Executor.started([*limits, *flags]) as executor:
        await _burst(executor, 8, 32)  # what is only slow the first time
        for _ in range(rounds):
            for num_rows, num_prompt in SHAPES:
                steps = await _burst(executor, num_rows, num_prompt)
                kept = by_shape.setdefault(f"{num_rows} x {num_prompt}", Steps([], []))
                kept.works += steps.works
                kept.seconds += steps.seconds
    works = [work for steps in by_shape.values() for work in steps.works]
    seconds = [value for steps in by_shape.values() for value in steps.seconds]
    latency = StepLatency.of_steps(works, seconds)
    errors = {}
    for name, steps in by_shape.items():
        found = [latency.step_s(work.num_tokens, work.num_context) for work in steps.works]
        errors[name] = float(np.median(np.array(found) / np.array(steps.seconds) - 1))
    return Measured(latency, len(works), errors)


async def _burst(executor: Executor, num_rows: int, num_prompt: int) -> Steps:
    longest = executor.lease.max_model_len
    mix = Mix("burst", ((min(num_prompt, longest - OUTPUT_TOKENS), OUTPUT_TOKENS),))
    source = Source(mix, executor.lease.vocab_size)
    async with Serving(executor, WatchedScheduler(prefix_caching=False)) as serving:
        serving.begin()
        for _ in range(num_rows):
            serving.submit(source.next(serving.now))
        await serving.until(lambda: serving.meter.ended == num_rows)
        return serving.steps
