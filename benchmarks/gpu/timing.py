"""How long work takes on a device, measured beside the other work that it is compared with.

On a GPU each piece of work is recorded as a CUDA graph and played again, so that what is timed is the device and not
the host that feeds it. Pieces take turns, and ratios are made of neighbours in time: a change of the clock between
them touches both. Work that would fit into the cache is given in several copies, taken in turn.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median

import torch

Work = Callable[[], object]
CACHE_TIMES = 4  # how often all copies of a piece of work together would fill the cache
HEAD_START_CYCLES = 20_000_000  # of the device, about 10 ms, in which the host queues work ahead of it


def num_copies(footprint_bytes: int, device: torch.device) -> int:
    """Of data of that size, to find none of it in the cache when its turn comes again."""
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 1
    return max(1, -(-CACHE_TIMES * cache_bytes // max(1, footprint_bytes)))


def take_turns(works: Mapping[str, Sequence[Work]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each repetition of each piece of work; its copies take turns as well."""
    if device.type != "cuda":
        return _on_cpu(works, repeats)
    played = {name: [recorded(work) for work in copies] for name, copies in works.items()}
    for copies in played.values():
        for play in copies:
            play()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats * len(played) + 1)]
    upcoming = iter(events)
    torch.cuda._sleep(HEAD_START_CYCLES)
    next(upcoming).record()
    for i in range(repeats):
        for copies in played.values():
            copies[i % len(copies)]()
            next(upcoming).record()
    torch.cuda.synchronize(device)
    elapsed = [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]
    return {name: elapsed[i :: len(played)] for i, name in enumerate(played)}


def recorded(work: Work) -> Callable[[], None]:
    """A CUDA graph of the work, which has run before, so that compiling is not part of it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _on_cpu(works: Mapping[str, Sequence[Work]], repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in works}
    for i in range(repeats):
        for name, copies in works.items():
            began = time.perf_counter()
            copies[i % len(copies)]()
            times[name].append(time.perf_counter() - began)
    return times


def significant(number: float) -> float:
    """Four digits are more than a clock gives."""
    return float(f"{number:.4g}")


def ratio(times: Mapping[str, Sequence[float]], of: str, to: str) -> float:
    """Median over the turns of one piece's time by the other's."""
    return significant(median(a / b for a, b in zip(times[of], times[to], strict=True)))


def typical_us(seconds: Sequence[float]) -> float:
    return significant(1e6 * median(seconds))


def copy_of(num_bytes: int, device: torch.device) -> Work:
    """A copy on the device that moves `num_bytes` in all: it reads half of them and writes as many."""
    source = torch.randint(0, 255, (max(1, num_bytes // 2),), dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    return lambda: destination.copy_(source)


def release_memory(device: torch.device) -> None:
    """What is free goes back to the device: the next workload's pieces are of other sizes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
