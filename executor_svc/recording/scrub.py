"""Takes what was said out of a recording: ids, masks, seeds and biases. Lengths stay, so that what is replayed has the
shapes of what was."""

import numpy as np

from paged.v1 import executor_pb2, recording_pb2


def scrubbed(entry: recording_pb2.RecordingEntry) -> recording_pb2.RecordingEntry:
    """A copy whose plans break no rule that they did not break before."""
    copy = recording_pb2.RecordingEntry()
    copy.CopyFrom(entry)
    match copy.WhichOneof("entry"):
        case "keyframe":
            for live in copy.keyframe.rows:
                _scrub_started(live.row)
        case "step":
            for merged in copy.step.plans:
                _scrub_plan(merged.plan)
                if merged.HasField("result"):
                    _scrub_result(merged.result)
        case "refused_plan":
            _scrub_plan(copy.refused_plan.plan)
    return copy


def _scrub_plan(plan: executor_pb2.StepPlan) -> None:
    for started in plan.started:
        _scrub_started(started)
    for sampling in (*plan.fork_sampling, *(joined.sampling for joined in plan.joined)):
        _scrub_sampling(sampling)
    plan.fork_tokens = bytes(len(plan.fork_tokens))
    plan.masks = b"\xff" * len(plan.masks)  # a mask allows something


def _scrub_started(started: executor_pb2.StartedRow) -> None:
    started.token_ids = bytes(len(started.token_ids))
    _scrub_sampling(started.sampling)


def _scrub_sampling(sampling: executor_pb2.RowSampling) -> None:
    sampling.seed = 0
    sampling.end_token_ids[:] = range(len(sampling.end_token_ids))
    sampling.bias_ids = _first_ids(len(sampling.bias_ids))
    sampling.biases = bytes(len(sampling.biases))
    sampling.allowed_ids = _first_ids(len(sampling.allowed_ids))
    sampling.banned_ids = bytes(len(sampling.banned_ids))


def _scrub_result(result: executor_pb2.StepResult) -> None:
    for column in ("sampled_ids", "logprob_ids", "prompt_logprob_ids"):
        setattr(result, column, _finite_or_not(getattr(result, column)))
    for column in ("logprobs", "logprob_ranks", "prompt_logprobs", "prompt_logprob_ranks"):
        setattr(result, column, bytes(len(getattr(result, column))))


def _first_ids(num_bytes: int) -> bytes:
    """As many ids as that takes, each once."""
    return np.arange(num_bytes // 4, dtype="<i4").tobytes()


def _finite_or_not(column: bytes) -> bytes:
    """0 for each id, and -1 where there was none."""
    return np.minimum(np.frombuffer(column, "<i4"), 0).tobytes()
