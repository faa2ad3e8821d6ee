"""Output tokens per second of the real model at saturation, at equal KV memory, under each policy.

What runs at saturation is found on paper; the real executor takes it over, computes it anew, and goes on. The window
begins when that is done. Policies take turns, and paged serves before and after the others. Few long requests end
within a window, so chance has a part in it; on paper, with steps that take what these did, many do (`paper_tokens_s`).
"""

from dataclasses import dataclass
from statistics import mean

from benchmarks.claims.memory import figures_of
from benchmarks.claims.memory import saturated as saturated_on_paper
from benchmarks.claims.paper import Paper, StepCosts
from benchmarks.claims.requests import Mix
from benchmarks.claims.served import Executor, Serving, Steps
from benchmarks.claims.setting import Figures, Setting
from benchmarks.claims.slabs import POLICIES
from benchmarks.claims.watched import WatchedScheduler


@dataclass(frozen=True, slots=True)
class Served:
    """Of one window."""

    tokens_s: float
    figures: Figures


async def measure(setting: Setting, executor: Executor) -> tuple[Figures, dict[str, StepCosts]]:
    """By mix and policy; and what steps of a mix cost, under any policy."""
    figures: Figures = {}
    costs: dict[str, StepCosts] = {}
    for mix in setting.mixes:
        figures[mix.name], steps = await _in_turns(setting, executor, mix)
        costs[mix.name] = StepCosts.fitted(steps.works, steps.seconds)
        for name, make in POLICIES.items():
            _, paper = saturated_on_paper(setting, make(setting.longest), mix, costs=costs[mix.name])
            figures[mix.name][name]["paper_tokens_s"] = round(paper.meter.tokens_s, 1)
    return figures, costs


async def _in_turns(setting: Setting, executor: Executor, mix: Mix) -> tuple[Figures, Steps]:
    """By policy; and all steps that were measured."""
    steps = Steps([], [])
    windows: dict[str, list[Served]] = {name: [] for name in POLICIES}
    for name in [*POLICIES] if setting.quick else [*POLICIES, "paged"]:
        windows[name].append(await saturated(setting, executor, POLICIES[name](setting.longest), mix, steps))
        setting.say(f"{mix.name} {name}: {windows[name][-1].tokens_s:.1f} tokens/s")
    rates = {name: mean(window.tokens_s for window in of_policy) for name, of_policy in windows.items()}
    figures: Figures = {}
    for name, of_policy in windows.items():
        figures[name] = {
            **of_policy[0].figures,
            "tokens_s": round(rates[name], 1),
            "windows_tokens_s": [round(window.tokens_s, 1) for window in of_policy],
            "paged_over_this": round(rates["paged"] / rates[name], 3),
        }
    return figures, steps


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
            {
                "ended": serving.meter.ended,
                "preemptions": scheduler.state.counters.preemptions - preemptions,
                "computed_over_sampled": round(serving.num_computed / serving.meter.tokens, 3),
                "step_ms": round(1e3 * sum(serving.steps.seconds) / len(serving.steps.seconds), 2),
                **figures_of(serving.occupancy),
            },
        )


async def taken_over(serving: Serving) -> None:
    """Until all that had begun elsewhere goes on here: each such sequence has got a token, or is over."""
    begun = [(sequence, len(sequence.token_ids)) for sequence in serving.taken_over]
    await serving.until(lambda: all(len(sequence.token_ids) > known for sequence, known in begun))
