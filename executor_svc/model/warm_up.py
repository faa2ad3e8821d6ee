"""The largest steps, run before anything is served: first calls are slow, and their time is a step's bound."""

import time
from dataclasses import dataclass

from executor_svc.model.made_steps import MadeStep, everything, make_step
from executor_svc.model.progress import Progress, silent, tracked
from executor_svc.step import Runner


@dataclass(frozen=True, slots=True)
class Room:
    """What an executor's steps have to fit into."""

    num_blocks: int
    block_size: int
    max_rows: int
    tokens_per_step: int
    max_model_len: int

    @property
    def table_width(self) -> int:
        """The most blocks of a row."""
        return -(-self.max_model_len // self.block_size)


def warm_up(runner: Runner, room: Room, *, compiles: bool, progress: Progress = silent) -> int:
    """Run a step with a long prompt and one with all rows. Returns the longer one's milliseconds, at least 1.

    Where kernels are compiled on their first call, each kind of step is run first, and each of the two is timed the
    second time.
    """
    slots = (room.num_blocks - 1) * room.block_size
    prompt = min(room.tokens_per_step, room.max_model_len, slots)
    rows = min(room.max_rows, room.tokens_per_step, room.num_blocks - 1)
    largest = [make_step([prompt], room.block_size), make_step([1] * rows, room.block_size)]
    untimed = [*_kinds(room), *largest] if compiles else []
    slowest = 0.0
    for number, made in enumerate(tracked(progress, "warming up", [*untimed, *largest])):
        if number < len(untimed):
            made.run(runner)
        else:
            slowest = max(slowest, _timed_ms(made, runner))
    runner.reset()
    return max(1, round(slowest))


def _kinds(room: Room) -> list[MadeStep]:
    """Kernels differ by how many rows share a step, by how many tokens each has, and by how long tables are."""
    made = []
    num_rows = 1
    while num_rows <= room.max_rows:
        for chunk in (1, 2, 64):
            tokens = min(chunk, room.max_model_len, room.tokens_per_step - num_rows + 1)
            for width in {1, room.table_width}:
                step = make_step(
                    [tokens] + [1] * (num_rows - 1), room.block_size, num_blocks=room.num_blocks, table_width=width
                )
                made.append(step)
        num_rows *= 4
    few = min(2, room.max_rows)
    made.append(make_step([1] * few, room.block_size, num_blocks=room.num_blocks, sampling=everything))
    return made


def _timed_ms(made: MadeStep, runner: Runner) -> float:
    runner.start_rows(made.starts)
    begin = time.perf_counter()
    runner.launch(made.step).result()
    elapsed_ms = (time.perf_counter() - begin) * 1e3
    runner.end_rows(made.step.rows)
    return elapsed_ms
