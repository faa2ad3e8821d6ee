"""Time to first token and between tokens against the rate at which requests come, until a policy is saturated.

Curves are found on paper, with steps that take what those of the real model took. Points are the real executor's: a
window that begins with what runs, and waits, at that rate.
"""

import time

from benchmarks.claims.meter import Meter, percentile
from benchmarks.claims.paper import Paper, StepCosts
from benchmarks.claims.requests import Mix, Poisson
from benchmarks.claims.served import Executor, Serving
from benchmarks.claims.setting import Figures, Setting
from benchmarks.claims.slabs import POLICIES
from benchmarks.claims.throughput import taken_over

# Of the rate that saturates paged memory.
LOADS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
SERVED_LOADS = {"paged": (0.25, 0.6, 0.8), "slab_max": (0.15,), "slab_pow2": (0.25,), "slab_oracle": (0.3,)}
QUICK_SERVED_LOADS = {"paged": (0.5,), "slab_max": (0.15,)}
WARM_REQUESTS, NUM_REQUESTS = 60, 240
SATURATED = 0.25  # of so many requests that have been served, as many wait


async def measure(setting: Setting, executor: Executor, costs: StepCosts, tokens_s: float) -> Figures:
    """Of the last mix; `tokens_s` is what paged memory gives at saturation."""
    mix = setting.mixes[-1]
    capacity = tokens_s / mix.mean_output
    served = QUICK_SERVED_LOADS if setting.quick else SERVED_LOADS
    figures: dict[str, object] = {"mix": mix.name, "capacity_requests_s": round(capacity, 3)}
    for name in POLICIES:
        on_paper = []
        for load in LOADS[1::3] if setting.quick else LOADS:
            on_paper.append(_on_paper(setting, name, mix, load * capacity, costs))
            if on_paper[-1]["saturated"]:
                break
        points = []
        for load in served.get(name, ()):
            points.append(await _served(setting, executor, name, mix, load * capacity, costs))
            setting.say(f"{name} at {points[-1]['rate']} requests/s: {_told(points[-1])}")
        figures[name] = {"paper": on_paper, "served": points}
    return figures


def _on_paper(setting: Setting, name: str, mix: Mix, rate: float, costs: StepCosts) -> Figures:
    paper = Paper(POLICIES[name](setting.longest), setting.lease(), Poisson(setting.source(mix), rate), costs)
    num_warm, num_requests = (WARM_REQUESTS // 3, NUM_REQUESTS // 3) if setting.quick else (WARM_REQUESTS, NUM_REQUESTS)
    while paper.meter.ended < num_warm:
        paper.step()
    paper.begin()
    while paper.meter.ended < num_requests:
        paper.step()
    paper.meter.take_waiting(paper.scheduler.state.queue)
    backlog = paper.scheduler.state.num_waiting
    return {"rate": round(rate, 3), **_latencies(paper.meter), "saturated": backlog > SATURATED * num_requests}


async def _served(setting: Setting, executor: Executor, name: str, mix: Mix, rate: float, costs: StepCosts) -> Figures:
    source = setting.source(mix)
    paper = Paper(POLICIES[name](setting.longest), setting.lease(), Poisson(source, rate), costs)
    while paper.meter.ended < WARM_REQUESTS:
        paper.step()
    paper.end()
    paper.scheduler.num_blocks = setting.num_blocks
    arrivals = Poisson(source, rate, seed=1, begin=time.perf_counter())
    async with Serving(executor, paper.scheduler, arrivals) as serving:
        await taken_over(serving)
        await serving.window(setting.window_s)
        serving.meter.take_waiting(serving.scheduler.state.queue)
        return {"rate": round(rate, 3), **_latencies(serving.meter), "step_costs": _compared(serving, costs)}


def _latencies(meter: Meter) -> Figures:
    return {
        "first_token_p50_s": _rounded(percentile(meter.first_tokens_s, 50)),
        "first_token_p90_s": _rounded(percentile(meter.first_tokens_s, 90)),
        "between_tokens_p50_s": _rounded(percentile(meter.gaps_s, 50)),
        "between_tokens_p99_s": _rounded(percentile(meter.gaps_s, 99)),
        "tokens_s": round(meter.tokens_s, 1),
    }


def _compared(serving: Serving, costs: StepCosts) -> float:
    """What steps took, over what they would have on paper."""
    return round(sum(serving.steps.seconds) / sum(map(costs.of, serving.steps.works)), 3)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _told(point: Figures) -> str:
    return ", ".join(f"{name} {value}" for name, value in point.items() if name != "rate")
