"""Requests behind one system prompt, with the prefix cache off and on: the real model, all at once, memory empty."""

import random

from benchmarks.claims.meter import percentile
from benchmarks.claims.requests import LOWEST_ID, Timing
from benchmarks.claims.served import Executor, Serving
from benchmarks.claims.setting import Figures, Setting
from benchmarks.claims.watched import WatchedScheduler
from scheduler_svc.core.sequence import Sampling, Sequence

LENGTHS = (0, 256, 512, 1024, 2048)
QUICK_LENGTHS = (0, 512)
NUM_REQUESTS, OWN_TOKENS, OUTPUT_TOKENS = 8, 64, 32
LONGEST = LENGTHS[-1] + OWN_TOKENS + OUTPUT_TOKENS
KV_TOKENS = NUM_REQUESTS * (LONGEST + 16)  # for all of them without sharing, but for what is kept free for growth


async def measure(setting: Setting, executor: Executor) -> Figures:
    """By tokens of the system prompt; those that the model, or its slice of memory, has no room for are left out."""
    figures: Figures = {}
    most = min(executor.lease.max_model_len, len(executor.lease.block_ids) * executor.lease.block_size // NUM_REQUESTS)
    for length in QUICK_LENGTHS if setting.quick else LENGTHS:
        if length + OWN_TOKENS + OUTPUT_TOKENS > most:
            continue
        off, on = [await _served(setting, executor, length, caching) for caching in (False, True)]
        faster = round(off["seconds"] / on["seconds"], 3)
        figures[str(length)] = {"off": off, "on": on, "faster": faster}
        setting.say(
            f"system prompt of {length}: {faster} times as fast with sharing, {on['blocks']}/{off['blocks']} blocks"
        )
    return figures


async def _served(setting: Setting, executor: Executor, length: int, caching: bool) -> Figures:
    scheduler = WatchedScheduler(prefix_caching=caching)
    chance = random.Random(length)
    system = _ids(setting, chance, length)
    async with Serving(executor, scheduler) as serving:
        serving.begin()
        for i in range(NUM_REQUESTS):
            prompt = system + _ids(setting, chance, OWN_TOKENS)
            greedy = Sampling(temperature=0)
            serving.submit(Sequence(f"p{i}", prompt, OUTPUT_TOKENS, greedy, owner=Timing(serving.now)))
        await serving.until(lambda: serving.meter.ended == NUM_REQUESTS)
        return {
            "seconds": round(serving.meter.seconds, 3),
            "first_token_p50_s": round(percentile(serving.meter.first_tokens_s, 50) or 0.0, 4),
            "tokens_computed": serving.num_computed,
            "blocks": scheduler.state.counters.peak_used_blocks,
        }


def _ids(setting: Setting, chance: random.Random, count: int) -> list[int]:
    return chance.choices(range(min(LOWEST_ID, setting.vocab_size - 1), setting.vocab_size), k=count)
