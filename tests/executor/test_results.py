"""Plans of several sessions run as one step, and each session hears of its own rows alone."""

from executor_svc.plan import read_plan
from executor_svc.results import asked_logprobs, fill_results
from executor_svc.simulated.runner import SimulatedRunner
from executor_svc.simulated.text import simulated_continuation
from executor_svc.stepper import Stepper
from paged.v1.executor_pb2 import StepPlan, StepResult
from tests.executor.plans import OTHER_SESSION, SESSION, ids_of, make_batch, sampling, schedule, start

VOCAB = 100


def say(*prompt: int) -> int:
    return simulated_continuation(prompt, 1, vocab_size=VOCAB)[0]


def logprob_ids(result: StepResult) -> list[int]:
    return ids_of(result.logprob_ids)


def test_a_merged_step_is_cut_into_each_sessions_results() -> None:
    batch = make_batch(vocab_size=VOCAB)
    stepper = Stepper(batch, SimulatedRunner(num_rows=4, num_blocks=12, block_size=4, vocab_size=VOCAB))
    mine = StepPlan(
        started=[
            start(0, [1, 2], [1], parameters=sampling(logprobs=1)),
            start(1, [3], [2]),
            start(2, [4, 5], [3], parameters=sampling(logprobs=2)),
        ]
    )
    theirs = StepPlan(started=[start(3, [6], [10], parameters=sampling(logprobs=0))])
    schedule(mine, (0, 2, True), (1, 1, True), (2, 1, False))
    schedule(theirs, (3, 1, True))
    plans = [
        batch.apply(read_plan(mine), SESSION),
        batch.apply(read_plan(theirs), OTHER_SESSION),
        batch.apply(read_plan(StepPlan()), SESSION),
    ]
    first, second, empty = results = [StepResult() for _ in plans]
    fill_results(plans, asked_logprobs(batch, plans), stepper.run(plans), results)
    assert ids_of(first.sampled_ids) == [say(1, 2), say(3)]
    assert logprob_ids(first) == [say(1, 2), say(1, 2)]
    assert ids_of(first.logprob_ranks) == [1]
    assert ids_of(second.sampled_ids) == [say(6)]
    assert logprob_ids(second) == [say(6)]
    assert len(second.logprobs) == 4
    assert (empty.sampled_ids, empty.logprob_ids) == (b"", b"")
