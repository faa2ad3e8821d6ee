"""What KV memory holds under each policy while more wait than run, counted on paper: exact, whatever the model."""

from benchmarks.claims.paper import Paper, StepCosts
from benchmarks.claims.requests import Mix
from benchmarks.claims.setting import BLOCK_SIZE, Figures, Setting
from benchmarks.claims.slabs import BEST_SLABS, POLICIES, PolicyMaker
from benchmarks.claims.watched import Occupancy, WatchedScheduler
from scheduler_svc.core.plan import Plan

CURVE_POINTS, CURVE_EVERY = 120, 10


def measure(setting: Setting) -> Figures:
    """By policy and mix: shares of memory, sequences that run, and what holds tokens from the first plan on."""
    policies: dict[str, PolicyMaker] = {**POLICIES, "slab_oracle_first_fit": BEST_SLABS}
    figures: dict[str, dict[str, Figures]] = {name: {} for name in policies}
    for mix in setting.mixes:
        for name, make in policies.items():
            curve = _from_empty(setting, make(setting.longest), mix)
            occupancy, _ = saturated(setting, make(setting.longest), mix)
            figures[name][mix.name] = {**figures_of(occupancy), "curve": curve}
    return dict(figures)


def saturated(
    setting: Setting,
    scheduler: WatchedScheduler,
    mix: Mix,
    *,
    block_size: int = BLOCK_SIZE,
    num_blocks: int | None = None,
    costs: StepCosts | None = None,
) -> tuple[Occupancy, Paper]:
    """Over `num_plans` plans, after half as many until nothing of the beginning is left."""
    paper = Paper(scheduler, setting.lease(num_blocks, block_size), setting.backlog(mix), costs)
    paper.steps(setting.num_plans // 2)
    occupancy = watched(scheduler)
    paper.begin()
    paper.steps(setting.num_plans)
    return occupancy, paper


def watched(scheduler: WatchedScheduler) -> Occupancy:
    """Added to with each plan from now on."""
    occupancy = Occupancy()
    scheduler.watch = lambda plan: occupancy.add(scheduler.state)
    return occupancy


def figures_of(occupancy: Occupancy) -> Figures:
    return {
        "utilisation": round(occupancy.utilisation, 4),
        "shares": {kind: round(share, 4) for kind, share in occupancy.shares.items()},
        "running": round(occupancy.running, 2),
        "mean_tokens": round(occupancy.mean_tokens, 1),
    }


def _from_empty(setting: Setting, scheduler: WatchedScheduler, mix: Mix) -> list[float]:
    """The share of all KV memory that holds tokens, every few plans."""
    curve: list[float] = []

    def watch(plan: Plan) -> None:
        if plan.step % CURVE_EVERY == 0:
            occupancy = Occupancy()
            occupancy.add(scheduler.state)
            curve.append(round(occupancy.shares["tokens"], 4))

    scheduler.watch = watch
    Paper(scheduler, setting.lease(), setting.backlog(mix)).steps(CURVE_POINTS * CURVE_EVERY)
    return curve
