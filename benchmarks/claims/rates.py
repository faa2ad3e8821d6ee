"""Time to first token and between tokens against the rate at which requests come, until a policy is saturated.

Curves are found on paper, with steps that take what those of the real model took at saturation, up to more than is let
through there. Points are the real executor's, for the first mix, of which enough requests come within a window: one
that begins with what runs, and waits, at that rate.
"""

import time

from benchmarks.claims.meter import Meter, percentile
from benchmarks.claims.paper import Paper, StepCosts
from benchmarks.claims.requests import Mix, Poisson
from benchmarks.claims.served import Executor, Serving
from benchmarks.claims.setting import Figures, Setting
from benchmarks.claims.slabs import POLICIES
from benchmarks.claims.throughput import taken_over

# Of the rate that saturates the policy itself: on paper, and served.
LOADS = (0.2, 0.4, 0.6, 0.75, 0.85, 0.95, 1.1, 1.4)
SERVED_LOADS, PAGED_SERVED_LOADS = (0.7,), (0.3, 0.6, 0.85)
QUICK_LOADS, QUICK_SERVED_LOADS = (0.4, 1.4), (0.7,)
WARM_REQUESTS, NUM_REQUESTS = 40, 160
REQUESTS_A_PLACE = 5  # more, for each that runs at saturation: before a queue grows, all places are taken
QUICK_PART = 4  # of these many
MAX_WARM_S = 300.0  # on paper's clock
SATURATED = 0.2  # as many wait, as a share of those that were served


async def measure(setting: Setting, executor: Executor, throughput: Figures, costs: dict[str, StepCosts]) -> Figures:
    """By mix and policy, from the tokens per second that each gives at saturation."""
    figures: Figures = {}
    for mix in setting.mixes:
        figures[mix.name] = {}
        for name in POLICIES:
            found = throughput[mix.name][name]
            on_paper = [_on_paper(setting, name, mix, load, found, costs[mix.name]) for load in _loads(setting)]
            points = []
            for load in _served_loads(setting, name) if mix is setting.mixes[0] else ():
                rate = load * found["tokens_s"] / mix.mean_output
                points.append(await _served(setting, executor, name, mix, rate, costs[mix.name]))
                setting.say(f"{mix.name} {name}, {_told(points[-1])}")
            figures[mix.name][name] = {"paper": on_paper, "served": points}
    return figures


def _loads(setting: Setting) -> tuple[float, ...]:
    return QUICK_LOADS if setting.quick else LOADS


def _served_loads(setting: Setting, name: str) -> tuple[float, ...]:
    if setting.quick:
        return QUICK_SERVED_LOADS if name == "paged" else ()
    return PAGED_SERVED_LOADS if name == "paged" else SERVED_LOADS


def _on_paper(setting: Setting, name: str, mix: Mix, load: float, found: Figures, costs: StepCosts) -> Figures:
    part = QUICK_PART if setting.quick else 1
    num_requests = int(NUM_REQUESTS + REQUESTS_A_PLACE * found["running"]) // part
    rate = load * found["paper_tokens_s"] / mix.mean_output
    paper = _warm(setting, name, mix, rate, costs, WARM_REQUESTS // part)
    paper.begin()
    while paper.meter.ended < num_requests:
        paper.step()
    paper.meter.take_waiting(paper.scheduler.state.queue)
    saturated = paper.scheduler.state.num_waiting > SATURATED * num_requests
    return {"rate": round(rate, 4), **_latencies(paper.meter), "saturated": saturated}


def _warm(setting: Setting, name: str, mix: Mix, rate: float, costs: StepCosts, num_requests: int) -> Paper:
    arrivals = Poisson(setting.source(mix), rate)
    paper = Paper(POLICIES[name](setting.longest), setting.lease(), arrivals, costs)
    while paper.meter.ended < num_requests and paper.now < MAX_WARM_S:
        paper.step()
    return paper


async def _served(setting: Setting, executor: Executor, name: str, mix: Mix, rate: float, costs: StepCosts) -> Figures:
    paper = _warm(setting, name, mix, rate, costs, WARM_REQUESTS)
    paper.end()
    paper.scheduler.num_blocks = setting.num_blocks
    arrivals = Poisson(setting.source(mix, seed=1), rate, seed=1, begin=time.perf_counter())
    async with Serving(executor, paper.scheduler, arrivals) as serving:
        await taken_over(serving)
        await serving.window(setting.window_s)
        serving.meter.take_waiting(serving.scheduler.state.queue)
        took, expected = sum(serving.steps.seconds), sum(map(costs.of, serving.steps.works))
        requests = len(serving.meter.first_tokens_s)
        return {
            "rate": round(rate, 4),
            **_latencies(serving.meter),
            "requests": requests,
            "steps_over_paper": round(took / expected, 3),
        }


def _latencies(meter: Meter) -> Figures:
    return {
        "first_token_p50_s": _rounded(percentile(meter.first_tokens_s, 50)),
        "first_token_p90_s": _rounded(percentile(meter.first_tokens_s, 90)),
        "between_tokens_p50_s": _rounded(percentile(meter.gaps_s, 50)),
        "between_tokens_p99_s": _rounded(percentile(meter.gaps_s, 99)),
        "tokens_s": round(meter.tokens_s, 1),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


def _told(point: Figures) -> str:
    return (
        f"{point['requests']} requests at {point['rate']}/s: first token after {point['first_token_p50_s']} s, "
        f"then every {point['between_tokens_p50_s']} s (medians)"
    )
