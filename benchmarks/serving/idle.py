"""How much of its time an executor waits for plans while streams are delivered: real processes, gRPC readers."""

from benchmarks.serving.streams import served, watch
from paged.load.generator import Load

STEP_US = 5_000
SETTLE_S, MEASURED_S = 2.0, 6.0


async def idle_share(num_streams: int, *executor_flags: str) -> float:
    """Time that the executor has waited for plans over all of its time, as it tells with each result."""
    async with served(1, num_streams, step_us=STEP_US, executor_flags=executor_flags) as system:
        window = await watch(system, Load(system.target, num_streams), SETTLE_S, MEASURED_S)
    (before,), (after,) = window.before[0].executors, window.after[0].executors
    wait_us, step_us = after.wait_us - before.wait_us, after.step_us - before.step_us
    return wait_us / (wait_us + step_us)
