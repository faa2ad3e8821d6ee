"""Block sizes: what the last block of a sequence wastes, counted on paper, against what attention takes with them.

Attention is that of `benchmarks.kernel`: decode of 64 sequences of 400 tokens in shuffled tables; and then a variant
without a table. Both are measured on this machine's CPU wherever the executor has its model, and say so. Native
kernels have a layout for blocks of multiples of 16 slots; others lie as, and are computed by, the reference in plain
torch.
"""

import torch

from benchmarks.claims.memory import saturated
from benchmarks.claims.setting import BLOCK_SIZE, Figures, Setting
from benchmarks.claims.slabs import paged_scheduler
from benchmarks.kernel import Decode, ratio_of
from kernels import Backend, backend
from kernels.cpu.caches import is_served

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
QUICK_SIZES = (16, 256)
NUM_ROWS, CONTEXT = 64, 400
LEAST_BYTES = 256 << 20
PAIRS, QUICK_PAIRS = 21, 7
DEVICE = "cpu"
REFERENCE_PAIRS, QUICK_REFERENCE_PAIRS = 5, 1


def waste(setting: Setting) -> Figures:
    """By block size and mix: the share of allocated memory that holds tokens, and sequences that run."""
    figures: Figures = {}
    for size in _sizes(setting):
        of_size: Figures = {}
        for mix in setting.mixes:
            occupancy, _ = saturated(setting, paged_scheduler(setting.longest), mix, block_size=size)
            of_size[mix.name] = {
                "utilisation": round(occupancy.utilisation, 4),
                "running": round(occupancy.running, 2),
                "unused_slots": round(
                    (occupancy.slots["to_come"] + occupancy.slots["never"]) / occupancy.num_running, 2
                ),
            }
        figures[str(size)] = of_size
    return figures


def speed(setting: Setting) -> Figures:
    """By block size: which kernels serve it, and their time over that of blocks of 16."""
    kernels = backend(torch.device(DEVICE))
    base = _decode(kernels, BLOCK_SIZE)
    figures: Figures = {}
    for size in _sizes(setting):
        native = kernels.level is not None and is_served(size, torch.bfloat16)
        pairs = _pairs(setting) if native else _reference_pairs(setting)
        decode = _decode(kernels, size)
        times, seconds = ratio_of(decode.attend, base.attend, pairs)
        times *= len(base.caches) / len(decode.caches)  # a round goes once over each
        name, ms = kernels.name if native else "reference", 1e3 * seconds / len(decode.caches)
        figures[str(size)] = {"kernels": name, "time_over_16": round(times, 3), "ms": round(ms, 3)}
        setting.say(f"blocks of {size}: {times:.3f} of the time of blocks of 16 ({name})")
    return figures


def table(setting: Setting) -> Figures:
    """Time through a shuffled table over that of a variant that computes where blocks are. Native kernels only."""
    kernels = backend(torch.device(DEVICE))
    if kernels.level is None:
        return {"device": DEVICE, "kernels": kernels.name, "note": kernels.note}
    decode = _decode(kernels, BLOCK_SIZE)
    paged, _ = ratio_of(decode.attend, decode.attend_without_tables, _pairs(setting))
    setting.say(f"a shuffled table: {paged:.3f} of the time without a table")
    return {"device": DEVICE, "kernels": kernels.name, "shuffled_over_no_table": round(paged, 4)}


def _sizes(setting: Setting) -> tuple[int, ...]:
    return QUICK_SIZES if setting.quick else SIZES


def _pairs(setting: Setting) -> int:
    return QUICK_PAIRS if setting.quick else PAIRS


def _reference_pairs(setting: Setting) -> int:
    return QUICK_REFERENCE_PAIRS if setting.quick else REFERENCE_PAIRS


def _decode(kernels: Backend, block_size: int) -> Decode:
    torch.manual_seed(0)
    return Decode.make(kernels, NUM_ROWS, CONTEXT, LEAST_BYTES, block_size)
