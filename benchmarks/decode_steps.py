"""How long a decode step of a loaded model takes, launched kernel by kernel or replayed as it was recorded.

from benchmarks.decode_steps import decode_ms
decode_ms(loaded.runner, num_rows=64, context_len=1024, num_blocks=loaded.num_blocks, block_size=16, graphs=False)
"""

import statistics
import time

from executor_svc.model.made_steps import make_step
from executor_svc.model.runner import ModelRunner
from executor_svc.step import Step


def decode_ms(
    runner: ModelRunner,
    *,
    num_rows: int,
    context_len: int,
    num_blocks: int,
    block_size: int,
    graphs: bool,
    num_steps: int = 50,
) -> float:
    """Median milliseconds of a greedy step, from its begin to the sampled ids on the host; each of the `num_rows` rows
    sees `context_len` tokens.

    Rows share blocks where there are fewer than they need, so what they sample means nothing. No row may be live.
    Raises ValueError with `graphs` where the runner has none.
    """
    recorded = runner.graphs
    if graphs and recorded is None:
        raise ValueError("graphs: is True, but decode steps of this runner were not recorded; see its log")
    made = make_step([1] * num_rows, block_size, before=context_len - 1, num_blocks=num_blocks)
    runner.graphs = recorded if graphs else None
    runner.start_rows(made.starts)
    try:
        times = [_timed_ms(runner, made.step) for _ in range(num_steps + 3)]
    finally:
        runner.end_rows(made.step.rows)
        runner.graphs = recorded
    return statistics.median(times[3:])


def _timed_ms(runner: ModelRunner, step: Step) -> float:
    begin = time.perf_counter()
    runner.run(step)
    return (time.perf_counter() - begin) * 1e3
