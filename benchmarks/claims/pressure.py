"""Preemption: what it costs to compute again what had to make room.

On paper, at ever less memory for the same requests: how often a sequence is preempted, and how many tokens are computed
more than once; without the prefix cache, and with it, where its blocks are still found if nobody needed them meanwhile.
Then the real model where nothing is kept free for growth, which is the most pressure that there can be.
"""

from benchmarks.claims.memory import saturated
from benchmarks.claims.served import Executor
from benchmarks.claims.setting import BLOCK_SIZE, Figures, Setting
from benchmarks.claims.throughput import saturated as served_saturated
from benchmarks.claims.watched import WatchedScheduler

MEMORY = (1 / 4, 1 / 2, 1, 2)  # of the setting's
WATERMARKS = (0.0, 0.05)


async def measure(setting: Setting, executor: Executor, tokens_s: float) -> Figures:
    """Of the last mix; `tokens_s` is what it gives with the usual watermark."""
    mix = setting.mixes[-1]
    on_paper: list[Figures] = []
    for share in MEMORY:
        num_blocks = max(int(share * setting.num_blocks), setting.longest // BLOCK_SIZE)
        for watermark in WATERMARKS:
            for caching in (False, True):
                told = {"kv_tokens": num_blocks * BLOCK_SIZE, "watermark": watermark, "prefix_caching": caching}
                on_paper.append({**told, **_on_paper(setting, num_blocks, watermark, caching)})
    served: list[Figures] = []
    for caching in (False, True):
        scheduler = _scheduler(setting, 0.0, caching)
        window = await served_saturated(setting, executor, scheduler, mix)
        ratio = round(window.tokens_s / tokens_s, 3)
        served.append({"watermark": 0.0, "prefix_caching": caching, **window.figures, "over_usual": ratio})
        setting.say(f"nothing kept free, prefix cache {caching}: {window.tokens_s:.1f} tokens/s, {ratio} of the usual")
    return {"paper": on_paper, "served": served}


def _on_paper(setting: Setting, num_blocks: int, watermark: float, caching: bool) -> Figures:
    scheduler = _scheduler(setting, watermark, caching)
    occupancy, paper = saturated(setting, scheduler, setting.mixes[-1], num_blocks=num_blocks)
    return {
        "running": round(occupancy.running, 2),
        "of_all_tokens": round(occupancy.shares["tokens"], 4),
        "preemptions_per_100": round(100 * paper.num_preempted / paper.meter.ended, 2),
        "computed_twice": round(max(paper.num_computed / paper.num_needed - 1, 0.0), 4),
    }


def _scheduler(setting: Setting, watermark: float, caching: bool) -> WatchedScheduler:
    return WatchedScheduler(prefix_caching=caching, watermark=watermark, longest=setting.longest)
