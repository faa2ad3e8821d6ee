"""Steps, preemptions and tokens computed twice for shares of the pool that admission leaves free, under pressure.

400 requests of 20 to 400 prompt tokens and 10 to 300 of output wait at once for a pool that holds some 30 of them; half
of the prompts begin like others. A step computes at most 512 tokens. Through the core alone: what counts is how many
steps the work takes, each as long as another where the model's weights are what takes time. Medians of three orders.
"""

import argparse
import json
import random
from collections import deque
from statistics import median

import numpy as np

from scheduler_svc.core.plan import Lease, Plan, Result
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence

SHARES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
NUM_REQUESTS, NUM_BLOCKS, BLOCK_SIZE = 400, 600, 16


def cost(watermark: float, seed: int) -> dict[str, float]:
    """Of one run: steps, preemptions, and tokens computed in vain as a share of those needed."""
    chance = random.Random(seed)
    scheduler = Scheduler(watermark=watermark)
    scheduler.attach(Lease(list(range(1, NUM_BLOCKS + 1)), list(range(256)), 512, BLOCK_SIZE))
    stems = [[chance.randint(10, 30_000) for _ in range(200)] for _ in range(4)]
    for i in range(NUM_REQUESTS):
        own = [chance.randint(10, 30_000) for _ in range(chance.randint(20, 200))]
        stem = chance.choice(stems)[: chance.randint(0, 200)] if i % 2 else []
        scheduler.submit(Sequence(f"r{i}", stem + own, chance.randint(10, 300)))
    in_flight: deque[Plan] = deque()
    num_steps = num_computed = 0
    while True:
        while len(in_flight) < 2 and (plan := scheduler.plan()) is not None:
            in_flight.append(plan)
            num_computed += int(plan.num_tokens.sum())
        if not in_flight:
            break
        oldest = in_flight.popleft()
        num_steps += len(oldest.rows) > 0
        scheduler.apply(Result(oldest.step, np.full(int(oldest.samples.sum()), 5, np.int32)))
    counters = scheduler.state.counters
    needed = counters.prompt_tokens + counters.generated_tokens - NUM_REQUESTS - counters.cached_prompt_tokens
    return {
        "steps": num_steps,
        "preemptions": counters.preemptions,
        "computed_twice": round(num_computed / needed - 1, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args()
    figures = {}
    for share in SHARES:
        runs = [cost(share, seed) for seed in range(3)]
        figures[str(share)] = {name: median(run[name] for run in runs) for name in runs[0]}
    if args.json:
        print(json.dumps({"watermark": figures}))
        return
    for name, figure in figures.items():
        print(f"{name:>5}: " + ", ".join(f"{value:g} {key}" for key, value in figure.items()))


if __name__ == "__main__":
    main()
