"""Output tokens per second of the real model at saturation, at equal KV memory, under each policy.

What runs at saturation is found on paper; the real executor takes it over, computes it anew, and goes on. The window
begins when no step is full of prompts any more. Policies take turns, and paged serves before and after the others.
"""

from dataclasses import dataclass

from benchmarks.claims.memory import figures_of
from benchmarks.claims.paper import Paper, StepCosts
from benchmarks.claims.requests import Mix
from benchmarks.claims.served import Executor, Serving, Steps
from benchmarks.claims.setting import TOKENS_PER_STEP, Figures, Setting
from benchmarks.claims.slabs import POLICIES
from benchmarks.claims.watched import WatchedScheduler


@dataclass(frozen=True, slots=True)
class Served:
    """Of one window."""

    tokens_s: float
    running: float
    figures: Figures


async def measure(setting: Setting, executor: Executor) -> tuple[Figures, StepCosts]:
    """By mix and policy; and what steps cost, of all windows."""
    figures: dict[str, dict[str, Figures]] = {}
    steps = Steps([], [])
    for mix in setting.mixes:
        taken = []
        order = [*POLICIES, "paged"]
        for name in order:
            taken.append(await saturated(setting, executor, POLICIES[name](setting.longest), mix, steps))
            setting.say(f"{mix.name} {name}: {taken[-1].tokens_s:.1f} tokens/s, {taken[-1].running:.1f} running")
        paged = (taken[0].tokens_s + taken[-1].tokens_s) / 2
        of_mix = {name: {**served.figures} for name, served in zip(order[:-1], taken[:-1], strict=True)}
        of_mix["paged"]["tokens_s"] = round(paged, 1)
        of_mix["paged"]["both_tokens_s"] = [round(served.tokens_s, 1) for served in (taken[0], taken[-1])]
        for name, served in zip(order[1:-1], taken[1:-1], strict=True):
            of_mix[name]["paged_over_this"] = round(paged / served.tokens_s, 3)
        figures[mix.name] = of_mix
    return dict(figures), StepCosts.fitted(steps.works, steps.seconds)


async def saturated(
    setting: Setting, executor: Executor, scheduler: WatchedScheduler, mix: Mix, steps: Steps | None = None
) -> Served:
    """One window, after what came before it on paper; its steps are added to `steps`."""
    backlog = setting.backlog(mix)
    paper = Paper(scheduler, setting.lease(scheduler.num_blocks), backlog)
    paper.steps(setting.num_plans // 2)
    paper.end()
    scheduler.num_blocks = scheduler.num_blocks or setting.num_blocks
    async with Serving(executor, scheduler, backlog) as serving:
        await taken_over(serving)
        preemptions = scheduler.state.counters.preemptions
        await serving.window(setting.window_s)
        if steps is not None:
            steps.works += serving.steps.works
            steps.seconds += serving.steps.seconds
        return Served(
            serving.meter.tokens_s,
            serving.occupancy.running,
            {
                "tokens_s": round(serving.meter.tokens_s, 1),
                "ended": serving.meter.ended,
                "preemptions": scheduler.state.counters.preemptions - preemptions,
                "computed_over_sampled": round(serving.num_computed / serving.meter.tokens, 3),
                "step_ms": round(1e3 * sum(serving.steps.seconds) / len(serving.steps.seconds), 2),
                **figures_of(serving.occupancy),
            },
        )


async def taken_over(serving: Serving) -> None:
    """Until all that ran elsewhere has been computed again: a step has tokens to spare."""
    await serving.until(lambda: bool(serving.steps.works) and serving.steps.works[-1].num_tokens < TOKENS_PER_STEP)
