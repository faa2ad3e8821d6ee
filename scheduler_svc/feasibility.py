"""Whether a request can still be answered in time: what cannot is refused at once, not computed for nobody.

The rule never refuses what could be met if all went well, by anything that was seen here:

* **Steps.** An answer takes at least the steps of its prompt (one, if all of it may be cached) and one for each further
  token that it has at least; a step takes at least as long as the fastest one of these executors did. A stream has been
  answered with its first token; an answer in one message, whose length is certain (ignore_eos, max_tokens, and nothing
  else that could end it), with its last.
* **Queue.** In the time that the steps leave, those ahead in the order must go. So many could, if in so short a time
  half as many have ever gone within the last half minute, for whatever reason. What has gone while the queue was empty
  at times, or no executor there, says nothing of how much could.
"""

from collections.abc import Iterable

from scheduler_svc.core.sequence import Sequence
from scheduler_svc.drain_rate import DrainRate
from scheduler_svc.driver import Driver
from scheduler_svc.errors import DeadlineTooShort
from scheduler_svc.requests import GenerationRequest

MARGIN = 2.0  # faster than ever seen is allowed for


def check_in_time(
    request: GenerationRequest, sequence: Sequence, executors: Iterable[Driver], drain_rate: DrainRate, left_s: float
) -> None:
    """`sequence` is the request's first and not in a queue yet. Raises DeadlineTooShort."""
    known = [executor for executor in executors if executor.fastest_step_us is not None]
    if not known:
        return
    least_s = min(_least_us(request, executor) for executor in known) / 1e6
    if least_s > left_s:
        found = f"its tokens alone take {least_s:.3g} s at least"
        raise DeadlineTooShort(f"the deadline leaves {left_s:.3g} s, and {found}")
    ahead = sum(executor.scheduler.state.queue.num_ahead(sequence) for executor in known)
    if ahead and ahead > MARGIN * drain_rate.most_within(left_s - least_s):
        found = f"{ahead} that wait go before, more than have ever gone in so short a time"
        raise DeadlineTooShort(f"the deadline leaves {left_s:.3g} s, and {found}")


def _least_us(request: GenerationRequest, executor: Driver) -> float:
    state = executor.scheduler.state
    num_steps = 1
    if request.bypass_cache or not state.prefix_caching:
        num_steps = -(-len(request.prompt_ids) // max(state.tokens_per_step, 1))
    if not request.streams:
        num_steps += _least_tokens(request) - 1
    return num_steps * (executor.fastest_step_us or 0)


def _least_tokens(request: GenerationRequest) -> int:
    may_end = not request.ignore_eos or request.stop_strings or request.stop_token_ids or request.grammar is not None
    least = request.sampling.min_tokens if request.grammar is None else 0
    if not may_end and request.max_tokens is not None:
        least = request.max_tokens
    return max(least, 1)
