"""The mathematics stay: greedy tokens of the real model, request by request, whichever policy hands out memory.

Requests come one at a time, so that every step computes the same rows whatever else there would be room for. Slabs are
consecutive blocks; those of paged tables lie in an order of chance.
"""

from benchmarks.claims.requests import Mix, Source
from benchmarks.claims.served import Executor, Serving
from benchmarks.claims.setting import Figures, Setting
from benchmarks.claims.slabs import POLICIES, PolicyMaker
from benchmarks.claims.watched import WatchedScheduler
from scheduler_svc.core.sequence import Sampling

REQUESTS = 3  # of each mix; of a quick run one, of the last
MOST_OUTPUT = 48  # tokens
# Prompts are of chance, after which a model soon repeats itself whatever it attends to, if it is let.
GREEDY = Sampling(temperature=0, repetition_penalty=1.5)

# Tokens of each request's output, by request.
Answers = list[list[int]]


async def measure(setting: Setting, executor: Executor) -> Figures:
    """How much was asked, and by slab policy how many requests got other tokens than with paging."""
    answers = {name: await _answers(setting, executor, make) for name, make in POLICIES.items()}
    paged = answers.pop("paged")
    found = {
        "requests": len(paged),
        "tokens": sum(map(len, paged)),
        "distinct_tokens": len(set().union(*paged)),
        "differing": {name: differing(given, paged) for name, given in answers.items()},
    }
    setting.say(f"{found['requests']} requests, {found['tokens']} tokens; that differ from paged: {found['differing']}")
    return found


def differing(given: Answers, expected: Answers) -> int:
    """Requests whose tokens are not the same."""
    return sum(a != b for a, b in zip(given, expected, strict=True))


def scheduler_of(setting: Setting, make: PolicyMaker) -> WatchedScheduler:
    """That policy's; a paged one hands out blocks in an order of chance."""
    scheduler = make(setting.longest)
    scheduler.num_blocks = setting.num_blocks
    scheduler.shuffled = make is POLICIES["paged"]
    return scheduler


async def _answers(setting: Setting, executor: Executor, make: PolicyMaker) -> Answers:
    answers: Answers = []
    async with Serving(executor, scheduler_of(setting, make)) as serving:
        for mix in setting.mixes[-1:] if setting.quick else setting.mixes:
            source = setting.source(_cut(mix))
            for _ in range(1 if setting.quick else REQUESTS):
                answers.append(await _answer(serving, source))
    return answers


async def _answer(serving: Serving, source: Source) -> list[int]:
    """To the next request, which has the executor to itself."""
    serving.begin()
    sequence = source.next(serving.now)
    sequence.sampling = GREEDY
    serving.submit(sequence)
    await serving.until(lambda: serving.meter.ended == 1)
    return sequence.token_ids[sequence.num_prompt :]


def _cut(mix: Mix) -> Mix:
    """With outputs short enough for a few seconds."""
    return Mix(mix.name, tuple((num_prompt, min(num_output, MOST_OUTPUT)) for num_prompt, num_output in mix.lengths))
