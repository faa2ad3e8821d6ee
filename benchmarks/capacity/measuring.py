"""What schedulers cost, from loads on a real one in each of which another piece of its work prevails."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.capacity.costs import SchedulerCosts, TaskCosts
from benchmarks.capacity.latency import StepLatency
from benchmarks.capacity.observed import Observed, Room, System

SETTLE_S, WINDOW_S = 2.0, 4.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Probe:
    """Requests a second, and tokens of each one's prompt and output."""

    what: str
    rate: float
    prompt: int
    output: int


OF_10_MS = (
    Probe("few streams", 10, 16, 100),
    Probe("requests", 220, 16, 8),
    Probe("long prompts", 20, 1500, 16),
    Probe("tokens", 40, 32, 160),
)
# In the second more tokens come than there is time for: several of a stream share a message.
OF_1_MS = (Probe("steps", 25, 16, 200), Probe("tokens that wait", 250, 16, 120))
MANY = Probe("open streams", 2500, 32, 1000)
MANY_SETTLE_S, MANY_WINDOW_S = 0.5, 0.2


async def scheduler_costs(say: Say) -> SchedulerCosts:
    """Raises ServiceFailed and ObservationFailed."""
    async with System.started(StepLatency(10_000), Room()) as system:
        seen = [await _observed(system, probe, say) for probe in OF_10_MS]
        idle_bytes = seen[0].scheduler_bytes
        before = seen[-1].scheduler_bytes
        many = await system.observe(MANY.rate, [(MANY.prompt, MANY.output)], MANY_SETTLE_S, MANY_WINDOW_S)
        stream_bytes = (many.scheduler_bytes - before) / many.seen.open_streams
        say(f"{many.seen.open_streams} open streams: {stream_bytes / 1e3:.1f} kB each")
    async with System.started(StepLatency(1_000), Room()) as system:
        seen += [await _observed(system, probe, say) for probe in OF_1_MS]
    works = [observed.work for observed in seen]
    loop = TaskCosts.fitted(works, [observed.loop_s for observed in seen])
    process = TaskCosts.fitted(works, [observed.process_s for observed in seen])
    return SchedulerCosts(loop, process, idle_bytes, stream_bytes)


async def _observed(system: System, probe: Probe, say: Say) -> Observed:
    observed = await system.observe(probe.rate, [(probe.prompt, probe.output)], SETTLE_S, WINDOW_S)
    seconds, work = observed.seen.seconds, observed.work
    say(
        f"{probe.what}: {work.requests / seconds:.0f} requests, {work.steps / seconds:.0f} steps, "
        f"{work.messages / seconds:.0f} messages, {work.tokens / seconds:.0f} tokens a second; "
        f"{observed.loop_s / seconds:.2f} of the loop's time, {observed.process_s / seconds:.2f} cores"
    )
    return observed
