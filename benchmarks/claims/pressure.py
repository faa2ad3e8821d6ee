"""Preemption: what it costs to compute again what had to make room.

On paper, for ever more memory: how often a sequence is preempted, how many tokens are computed once more, and what
steps that cost as those of the real model let through; for several shares of memory that admission keeps free for the
growth of what runs, and without the prefix cache, in which blocks of the preempted are found again while nobody needed
them. Then the real model, with nothing kept free and with much.
"""

from benchmarks.claims.memory import saturated
from benchmarks.claims.paper import StepCosts
from benchmarks.claims.served import Executor
from benchmarks.claims.setting import BLOCK_SIZE, Figures, Setting
from benchmarks.claims.throughput import ROUNDS, Windows, add_window
from benchmarks.claims.watched import WatchedScheduler

MEMORY, QUICK_MEMORY = (1 / 2, 1, 2, 4, 8), (1, 4)  # of the setting's
USUAL = 0.05
# Watermark, and whether there is a prefix cache.
KEPT = ((0.0, True), (USUAL, True), (USUAL, False), (0.1, True), (0.2, True))
SERVED_WATERMARKS, QUICK_SERVED_WATERMARKS = (0.0, 0.2), (0.0,)


async def measure(setting: Setting, executor: Executor, tokens_s: float, costs: StepCosts) -> Figures:
    """Of the last mix; `tokens_s` is what it gives as usual."""
    mix = setting.mixes[-1]
    on_paper: list[Figures] = []
    for share in QUICK_MEMORY if setting.quick else MEMORY:
        num_blocks = max(int(share * setting.num_blocks), setting.longest // BLOCK_SIZE)
        on_paper += [_on_paper(setting, num_blocks, watermark, caching, costs) for watermark, caching in KEPT]
    served: list[Figures] = []
    for watermark in QUICK_SERVED_WATERMARKS if setting.quick else SERVED_WATERMARKS:
        windows = Windows()
        for number in range(1 if setting.quick else ROUNDS):
            scheduler = WatchedScheduler(watermark=watermark, longest=setting.longest)
            await add_window(windows, setting, executor, scheduler, mix, number)
        ratio = round(windows.tokens_s / tokens_s, 3)
        served.append({"watermark": watermark, **windows.figures, "over_usual": ratio})
        setting.say(f"{watermark:.0%} kept free: {windows.tokens_s:.1f} tokens/s, {ratio} of the usual")
    return {"mix": mix.name, "paper": on_paper, "served": served}


def _on_paper(setting: Setting, num_blocks: int, watermark: float, caching: bool, costs: StepCosts) -> Figures:
    scheduler = WatchedScheduler(prefix_caching=caching, watermark=watermark, longest=setting.longest)
    occupancy, paper = saturated(setting, scheduler, setting.mixes[-1], num_blocks=num_blocks, costs=costs, part=0.4)
    return {
        "kv_tokens": num_blocks * BLOCK_SIZE,
        "watermark": watermark,
        "prefix_caching": caching,
        "running": round(occupancy.running, 2),
        "preemptions_per_100": round(100 * paper.num_preempted / paper.meter.ended, 2),
        "computed_again": round(max(paper.num_computed / paper.num_needed - 1, 0.0), 4),
        "tokens_s": round(paper.meter.tokens_s, 1),
    }
