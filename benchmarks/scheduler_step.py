"""Time of one plan() and one apply() while N sequences decode, without anything around them.

Two plans are in flight, the prefix cache is on, full blocks are hashed and published, and each token is appended to its
request's list: all that a step costs the core. Lengths are spread, so that each step fills N / 16 blocks.
Peer: the vLLM 0.32 scheduler (schedule + update_from_output, decode only) takes 0.9, 3.2 and 13.9 ms.
"""

import argparse
import json
import random
import time
from collections import deque
from statistics import median

import numpy as np

from scheduler_svc.core.plan import Lease, Plan, Result
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence

SIZES = (64, 256, 1024)
BLOCK_SIZE = 16


def plan_apply_us(num_running: int, steps: int) -> float:
    """Median time in µs of plan + apply over `steps` decode steps of `num_running` sequences."""
    scheduler = _filled(num_running, steps)
    chance = np.random.default_rng(0)
    in_flight: deque[Plan] = deque()
    times: list[float] = []
    while len(times) < steps:
        begin = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        if plan is None:
            raise RuntimeError("nothing to plan: the sequences are too short for this many steps")
        in_flight.append(plan)
        if len(in_flight) < 2:
            continue
        oldest = in_flight.popleft()
        tokens = chance.integers(10, 30_000, int(oldest.samples.sum()), dtype=np.int32)
        received = time.perf_counter()
        scheduler.apply(Result(oldest.step, tokens))
        elapsed = planned - begin + time.perf_counter() - received
        if not oldest.started and len(oldest.rows) == num_running:
            times.append(elapsed)
    return 1e6 * median(times)


def _filled(num_running: int, steps: int) -> Scheduler:
    """A scheduler with that many requests waiting, of 32 to 512 prompt tokens, that will not end within `steps`."""
    chance = random.Random(0)
    length = 512 + steps + 64
    blocks = num_running * (length // BLOCK_SIZE + 1) + 1
    scheduler = Scheduler()
    scheduler.attach(Lease(list(range(1, 2 * blocks)), list(range(num_running)), 1 << 20, BLOCK_SIZE))
    for i in range(num_running):
        prompt = [chance.randint(10, 30_000) for _ in range(chance.randint(32, 512))]
        scheduler.submit(Sequence(f"r{i}", prompt, steps + 64, end_token_ids=(1, 2)))
    return scheduler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--steps", type=int, default=300, help="decode steps for each size")
    args = parser.parse_args()
    figures = {str(size): round(plan_apply_us(size, args.steps), 1) for size in SIZES}
    if args.json:
        print(json.dumps({"plan_apply_us": figures}))
        return
    for size, figure in figures.items():
        print(f"{size:>5} running: {figure:7.1f} µs for plan + apply")


if __name__ == "__main__":
    main()
