"""Preemption: what it costs to compute again what had to make room.

On paper, for ever more memory: how often a sequence is preempted, how many tokens are computed once more, and what
steps that cost as those of the real model let through; for several shares of memory that admission keeps free for the
growth of what runs, and without the prefix cache, in which blocks of the preempted are found again while nobody needed
them. Then the real model, with nothing kept free.
"""

from benchmarks.claims.memory import saturated
from benchmarks.claims.paper import StepCosts
from benchmarks.claims.served import Executor
from benchmarks.claims.setting import BLOCK_SIZE, Figures, Setting
from benchmarks.claims.throughput import ROUNDS, Windows, add_window
from benchmarks.claims.watched import WatchedScheduler

MEMORY, QUICK_MEMORY = (1 / 2, 1, 2, 4), (1,)  # of the setting's
USUAL = 0.05
# Watermark, and whether there is a prefix cache.
KEPT = ((0.0, True), (USUAL, True), (USUAL, False), (0.1, True), (0.2, True))


async def measure(setting: Setting, executor: Executor, usual_tokens_s: list[float], costs: StepCosts) -> Figures:
    """Of the last mix; `usual_tokens_s` is what its windows give as usual, which begin at the same moments of it."""
    mix = setting.mixes[-1]
    on_paper: list[Figures] = []
    for share in QUICK_MEMORY if setting.quick else MEMORY:
        num_blocks = max(int(share * setting.num_blocks), setting.longest // BLOCK_SIZE)
        on_paper += [_on_paper(setting, num_blocks, watermark, caching, costs) for watermark, caching in KEPT]
    windows = Windows()
    for number in range(1 if setting.quick else ROUNDS):
        scheduler = WatchedScheduler(watermark=0.0, longest=setting.longest)
        await add_window(windows, setting, executor, scheduler, mix, number)
    given = windows.figures["windows_tokens_s"]
    ratio = round(sum(given) / sum(usual_tokens_s[: len(given)]), 3)
    setting.say(f"nothing kept free: {windows.tokens_s:.1f} tokens/s, {ratio} of the usual")
    return {"mix": mix.name, "paper": on_paper, "served": {**windows.figures, "over_usual": ratio}}


def _on_paper(setting: Setting, num_blocks: int, watermark: float, caching: bool, costs: StepCosts) -> Figures:
    scheduler = WatchedScheduler(prefix_caching=caching, watermark=watermark, longest=setting.longest)
    occupancy, paper = saturated(setting, scheduler, setting.mixes[-1], num_blocks=num_blocks, costs=costs)
    return {
        "kv_tokens": num_blocks * BLOCK_SIZE,
        "watermark": watermark,
        "prefix_caching": caching,
        "running": round(occupancy.running, 2),
        "preemptions_per_100": round(100 * paper.num_preempted / max(paper.meter.ended, 1), 2),
        "computed_again": round(max(paper.num_computed / paper.num_needed - 1, 0.0), 4),
        "tokens_s": round(paper.meter.tokens_s, 1),
    }
