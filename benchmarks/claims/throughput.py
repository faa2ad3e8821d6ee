"""Output tokens per second of the real model at saturation, at equal KV memory, under each policy.

What runs at saturation is found on paper; the real executor takes it over, computes it anew, and goes on. A window
begins when that is done. Policies take turns, round by round; each round begins with what runs at another time. Few
requests end within so many seconds, and of long ones few run, so chance has a part in it: which of them run decides how
many there is room for. On paper, with steps that take what these did, many end (`paper_tokens_s`).
"""

import math
import time
from dataclasses import dataclass, field

from benchmarks.claims.memory import saturated
from benchmarks.claims.paper import Paper, StepCosts
from benchmarks.claims.requests import Backlog, Mix
from benchmarks.claims.served import Executor, Serving, Steps
from benchmarks.claims.setting import BACKLOG, Figures, Setting
from benchmarks.claims.slabs import POLICIES
from benchmarks.claims.watched import WatchedScheduler

ROUNDS, ROUNDS_OF_LONG = 4, 8
MORE_WITHIN_S = 370.0  # of the section: a slow machine makes fewer rounds of long requests, to end in its quarter hour
LONG_OUTPUT = 100  # tokens, on average
WINDOW_PART = 1 / 4  # of a setting's window
WARM_PLANS = 1500


@dataclass(slots=True)
class Windows:
    """Of one policy, added up."""

    rates: list[float] = field(default_factory=list)  # tokens per second of each
    tokens: int = 0
    seconds: float = 0.0
    ended: int = 0
    preemptions: int = 0
    num_computed: int = 0
    running: list[float] = field(default_factory=list)
    steps: Steps = field(default_factory=lambda: Steps([], []))

    @property
    def tokens_s(self) -> float:
        return self.tokens / self.seconds

    def add(self, serving: Serving, preemptions: int) -> None:
        meter = serving.meter
        self.rates.append(meter.tokens_s)
        self.tokens += meter.tokens
        self.seconds += meter.seconds
        self.ended += meter.ended
        self.preemptions += preemptions
        self.num_computed += serving.num_computed
        self.running.append(serving.occupancy.running)
        self.steps.works += serving.steps.works
        self.steps.seconds += serving.steps.seconds

    @property
    def figures(self) -> Figures:
        return {
            "tokens_s": round(self.tokens_s, 1),
            "windows_tokens_s": [round(rate, 1) for rate in self.rates],
            "running": round(sum(self.running) / len(self.running), 2),
            "ended": self.ended,
            "preemptions": self.preemptions,
            "computed_over_sampled": round(self.num_computed / self.tokens, 3),
            "step_ms": round(1e3 * sum(self.steps.seconds) / len(self.steps.seconds), 2),
        }


async def measure(setting: Setting, executor: Executor) -> tuple[Figures, dict[str, StepCosts]]:
    """By mix and policy; and what steps of a mix cost, under any policy."""
    figures: Figures = {}
    costs: dict[str, StepCosts] = {}
    began = time.perf_counter()
    for mix in setting.mixes:
        windows = {name: Windows() for name in POLICIES}
        for number in range(_num_rounds(setting, mix)):
            if number >= ROUNDS and time.perf_counter() - began > MORE_WITHIN_S:
                break
            for name, of_policy in windows.items():
                await add_window(of_policy, setting, executor, POLICIES[name](setting.longest), mix, number)
        all_steps = [of_policy.steps for of_policy in windows.values()]
        works = [work for steps in all_steps for work in steps.works]
        costs[mix.name] = StepCosts.fitted(works, [seconds for steps in all_steps for seconds in steps.seconds])
        figures[mix.name] = {name: of_policy.figures for name, of_policy in windows.items()}
        for name, told in figures[mix.name].items():
            told["paged_over_this"] = round(windows["paged"].tokens_s / windows[name].tokens_s, 3)
            told["paged_over_this_error"] = ratio_error(windows["paged"].rates, windows[name].rates)
            told["paper_tokens_s"] = _on_paper(setting, POLICIES[name](setting.longest), mix, costs[mix.name])
            setting.say(f"{mix.name} {name}: {told['tokens_s']} tokens/s, on paper {told['paper_tokens_s']}")
    return figures, costs


def ratio_error(over: list[float], under: list[float]) -> float | None:
    """The standard error of a ratio of two means, by the jackknife over rounds: each leaves out one, of both. None of
    a single round."""
    count = len(over)
    if count < 2:
        return None
    ratios = [(sum(over) - a) / (sum(under) - b) for a, b in zip(over, under, strict=True)]
    mean = sum(ratios) / count
    return round(math.sqrt((count - 1) / count * sum((ratio - mean) ** 2 for ratio in ratios)), 3)


def _num_rounds(setting: Setting, mix: Mix) -> int:
    """At most: more where fewer requests are in a window."""
    if setting.quick:
        return 1
    return ROUNDS_OF_LONG if mix.mean_output > LONG_OUTPUT else ROUNDS


async def add_window(
    windows: Windows, setting: Setting, executor: Executor, scheduler: WatchedScheduler, mix: Mix, number: int
) -> None:
    """One more, after what came before it on paper; `number` says with which requests it begins."""
    scheduler.num_blocks = setting.num_blocks
    backlog = Backlog(setting.source(mix, number), BACKLOG)
    paper = Paper(scheduler, setting.lease(), backlog)
    paper.steps(min(WARM_PLANS, setting.num_plans // 2))
    paper.end()
    async with Serving(executor, scheduler, backlog) as serving:
        await taken_over(serving)
        preemptions = scheduler.state.counters.preemptions
        await serving.window(setting.window_s if setting.quick else WINDOW_PART * setting.window_s)
        windows.add(serving, scheduler.state.counters.preemptions - preemptions)


async def taken_over(serving: Serving) -> None:
    """Until all that had begun elsewhere goes on here: each such sequence has got a token, or is over."""
    begun = [(sequence, len(sequence.token_ids)) for sequence in serving.taken_over]
    await serving.until(lambda: all(len(sequence.token_ids) > known for sequence, known in begun))


def _on_paper(setting: Setting, scheduler: WatchedScheduler, mix: Mix, costs: StepCosts) -> float:
    """Tokens per second."""
    _, paper = saturated(setting, scheduler, mix, costs=costs)
    return round(paper.meter.tokens_s, 1)
