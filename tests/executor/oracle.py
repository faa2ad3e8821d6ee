"""The shortest plans that make an executor speak, and what it must say."""

from executor_svc.simulated.text import simulated_continuation
from paged.v1.executor_pb2 import StepPlan
from tests.executor.client import PlanClient
from tests.executor.plans import ids_of, schedule
from tests.executor.plans import start as start_row

PROMPT = [5, 17, 999, 0, 3]
VOCAB = 32000


def prefill(row: int = 0, block: int = 1) -> StepPlan:
    return schedule(StepPlan(started=[start_row(row, PROMPT, [block])]), (row, len(PROMPT), True))


def decode(row: int = 0) -> StepPlan:
    return schedule(StepPlan(), (row, 1, True))


def says_the_oracle(client: PlanClient, count: int = 4, vocab_size: int = VOCAB) -> bool:
    said = ids_of(client.run(prefill()).sampled_ids)
    for _ in range(count - 1):
        said += ids_of(client.run(decode()).sampled_ids)
    return said == simulated_continuation(PROMPT, count, vocab_size=vocab_size)
