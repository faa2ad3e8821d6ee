"""Cuts the outcome of a merged step into what each session's plan is answered with."""

import numpy as np

from executor_svc.applied_plan import AppliedPlan
from executor_svc.batch import NO_LOGPROBS, ResidentBatch
from executor_svc.step import Logprobs, Scored, StepOutput
from paged.v1 import executor_pb2


def fill_results(
    batch: ResidentBatch, plans: list[AppliedPlan], output: StepOutput, results: list[executor_pb2.StepResult]
) -> None:
    """Fill the sampled columns of each plan's result in."""
    if output.prompt_logprobs is not None:
        _fill_prompt_logprobs([plan.step.scored for plan in plans], output.prompt_logprobs, results)
    if len(plans) == 1 and output.logprobs is None:
        results[0].sampled_ids = output.sampled_ids.astype("<i4", copy=False).tobytes()
        return
    ids_at = entries_at = ranks_at = 0
    for plan, result in zip(plans, results, strict=True):
        rows = plan.step.drawing_rows
        sampled = output.sampled_ids[ids_at : ids_at + len(rows)]
        ids_at += len(rows)
        result.sampled_ids = sampled.astype("<i4").tobytes()
        if output.logprobs is not None:
            asked = batch.num_logprobs[rows]
            asked = asked[asked != NO_LOGPROBS]
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
