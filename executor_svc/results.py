"""Cuts the outcome of a merged step into what each session's plan is answered with."""

import numpy as np

from executor_svc.applied_plan import AppliedPlan
from executor_svc.batch import NO_LOGPROBS, ResidentBatch
from executor_svc.step import Int32s, Logprobs, Scored, StepOutput
from paged.v1 import executor_pb2


def asked_logprobs(batch: ResidentBatch, plans: list[AppliedPlan]) -> list[Int32s]:
    """For each plan, what `num_logprobs` is of the rows that draw. To be asked before the step's outcome is waited for:
    their session may end meanwhile, and the batch knows nothing of them any more."""
    return [batch.num_logprobs.take(plan.step.drawing_rows) for plan in plans]


def fill_results(
    plans: list[AppliedPlan], asked_of: list[Int32s], output: StepOutput, results: list[executor_pb2.StepResult]
) -> None:
    """Fill the sampled columns of each plan's result in; `asked_of` is what `asked_logprobs` has told of the plans."""
    if output.prompt_logprobs is not None:
        _fill_prompt_logprobs([plan.step.scored for plan in plans], output.prompt_logprobs, results)
    ids_at = entries_at = ranks_at = 0
    for drawing, result in zip(asked_of, results, strict=True):
        sampled = output.sampled_ids[ids_at : ids_at + len(drawing)]
        ids_at += len(drawing)
        result.sampled_ids = sampled.astype("<i4", copy=False).tobytes()
        if output.logprobs is not None:
            asked = drawing[drawing != NO_LOGPROBS]
            entries = slice(entries_at, entries_at + len(asked) + int(asked.sum(dtype=np.int64)))
            result.logprob_ids = output.logprobs.ids[entries].astype("<i4").tobytes()
            result.logprobs = output.logprobs.values[entries].astype("<f4").tobytes()
            result.logprob_ranks = output.logprobs.ranks[ranks_at : ranks_at + len(asked)].astype("<i4").tobytes()
            entries_at = entries.stop
            ranks_at += len(asked)


def _fill_prompt_logprobs(
    scored: list[Scored | None], logprobs: Logprobs, results: list[executor_pb2.StepResult]
) -> None:
    entries_at = ranks_at = 0
    for own, result in zip(scored, results, strict=True):
        if own is None:
            continue
        entries = slice(entries_at, entries_at + len(own.targets) + int(own.num_top.sum()))
        result.prompt_logprob_ids = logprobs.ids[entries].astype("<i4").tobytes()
        result.prompt_logprobs = logprobs.values[entries].astype("<f4").tobytes()
        result.prompt_logprob_ranks = logprobs.ranks[ranks_at : ranks_at + len(own.targets)].astype("<i4").tobytes()
        entries_at = entries.stop
        ranks_at += len(own.targets)
