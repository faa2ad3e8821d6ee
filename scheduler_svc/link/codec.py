"""The core's plans and results as messages of executor.proto, and back. Columns are little-endian int32 bytes."""

from array import array
from collections.abc import Sequence as Items
from itertools import islice

import numpy as np

from paged.v1 import executor_pb2 as pb
from scheduler_svc.core.plan import (
    NOTHING_RETURNED,
    Amounts,
    Demand,
    JoinedRow,
    Lease,
    LeaseChange,
    LogprobColumn,
    Plan,
    Result,
    Returned,
    StartedRow,
)
from scheduler_svc.core.sequence import Sampling, TokenLogprobs
from scheduler_svc.core.token_rules import NO_RULES, TokenRules

# What a lease may name; the core's columns are as long as the largest id.
MAX_BLOCK_ID = (1 << 24) - 1
MAX_ROW_ID = (1 << 16) - 1
MAX_PLANS_IN_FLIGHT = 16
# What a model may be: masks, plans and tables are as large as it says, and its texts go to callers and other executors.
MAX_BLOCK_SIZE = 1 << 12
MAX_MODEL_LEN = 1 << 24
MAX_VOCAB_SIZE = 1 << 22
MAX_TOKENS_PER_STEP = 1 << 24
MAX_END_IDS = 1024
MAX_TEXT_BYTES = 1024

INT32 = np.dtype("<i4")
FLOAT32 = np.dtype("<f4")


class MalformedMessage(Exception):
    """A message of the executor that does not say what it should."""


def encode_plan(plan: Plan, epoch: int, session: int) -> bytes:
    """One StepPlan, wrapped as ToExecutor."""
    envelope = pb.ToExecutor()
    message = envelope.plan  # filled in place: a StepPlan made apart would be copied
    message.epoch, message.session, message.step = epoch, session, plan.step
    if len(plan.appended_rows):
        message.appended_rows, message.appended_blocks = _bytes(plan.appended_rows), _bytes(plan.appended_blocks)
    if plan.forks:
        message.fork_parents = _bytes([fork.parent for fork in plan.forks])
        message.fork_children = _bytes([fork.row for fork in plan.forks])
        message.fork_tokens = _bytes([fork.token for fork in plan.forks])
        message.fork_sampling.extend(_row_sampling(fork.sampling, ()) for fork in plan.forks)
    if plan.ended:
        message.ended_rows = _bytes(plan.ended)
    if plan.started:
        message.started.extend(map(_started_row, plan.started))
    if plan.joined:
        message.joined.extend(map(_joined_row, plan.joined))
    if plan.copies.rows:
        message.copy_rows, message.copy_sources = _bytes(plan.copies.rows), _bytes(plan.copies.sources)
        message.copy_destinations = _bytes(plan.copies.destinations)
    message.scheduled_rows, message.scheduled_tokens = _bytes(plan.rows), _bytes(plan.num_tokens)
    message.scheduled_samples = plan.samples.tobytes()
    if plan.masks.rows:
        message.mask_rows, message.masks = _bytes(plan.masks.rows), b"".join(plan.masks.masks)
    if plan.returned is not NOTHING_RETURNED:
        _add_returned(message, plan.returned)
    if plan.demand is not None:
        message.demand.CopyFrom(_demand(plan.demand))
    message.exclusive = plan.exclusive
    return envelope.SerializeToString()


def decode_lease(attached: pb.Attached) -> Lease:
    """Raises MalformedMessage unless the lease can be worked with, and the model can be one."""
    _check_model(attached)
    lease = Lease(
        block_ids=array("i", _ints(attached.lease.block_ids).tobytes()),  # kept, and there are many
        row_ids=_ints(attached.lease.row_ids).tolist(),
        tokens_per_step=attached.lease.tokens_per_step,
        block_size=attached.model.block_size,
        plans_in_flight=attached.lease.plans_in_flight,
        max_model_len=attached.model.max_model_len,
        vocab_size=attached.model.vocab_size,
        rope_switch_len=attached.model.rope_switch_len,
        most_lent=Amounts(attached.lease.most_blocks, attached.lease.most_rows, attached.lease.most_tokens_per_step),
    )
    _check_ids("block_ids", lease.block_ids, 1, MAX_BLOCK_ID)
    _check_ids("row_ids", lease.row_ids, 0, MAX_ROW_ID)
    if not 1 <= lease.plans_in_flight <= MAX_PLANS_IN_FLIGHT:
        raise MalformedMessage(f"lease.plans_in_flight: {lease.plans_in_flight}, must be 1 to {MAX_PLANS_IN_FLIGHT}")
    _check_number("lease.tokens_per_step", lease.tokens_per_step, MAX_TOKENS_PER_STEP)
    if lease.tokens_per_step < len(lease.row_ids):
        raise MalformedMessage(
            f"lease.tokens_per_step: {lease.tokens_per_step}, {len(lease.row_ids)} rows need as many"
        )
    _check_number("lease.most_tokens_per_step", lease.most.tokens, MAX_TOKENS_PER_STEP)
    if lease.most.blocks > MAX_BLOCK_ID or lease.most.rows > MAX_ROW_ID + 1:
        raise MalformedMessage(f"lease.most_rows: {lease.most.rows}, most_blocks: {lease.most.blocks}: too many")
    return lease


def decode_lease_change(message: pb.LeaseChange) -> LeaseChange:
    """Raises MalformedMessage where ids cannot be; whether they are new is looked at by the core."""
    recall = message.recall
    change = LeaseChange(
        granted_blocks=_ints(message.granted_blocks).tolist(),
        granted_rows=_ints(message.granted_rows).tolist(),
        granted_tokens=message.granted_tokens_per_step,
        keep=Amounts(recall.blocks, recall.rows, recall.tokens_per_step) if message.HasField("recall") else None,
    )
    if change.granted_blocks:
        _check_ids("block_ids", change.granted_blocks, 1, MAX_BLOCK_ID)
    if change.granted_rows:
        _check_ids("row_ids", change.granted_rows, 0, MAX_ROW_ID)
    return change


def _check_model(attached: pb.Attached) -> None:
    model = attached.model
    _check_number("model.block_size", model.block_size, MAX_BLOCK_SIZE)
    _check_number("model.max_model_len", model.max_model_len, MAX_MODEL_LEN)
    _check_number("model.vocab_size", model.vocab_size, MAX_VOCAB_SIZE)
    if len(model.eos_token_ids) > MAX_END_IDS:
        raise MalformedMessage(f"model.eos_token_ids: {len(model.eos_token_ids)} ids; {MAX_END_IDS} are allowed")
    texts = (attached.executor_id, model.name, model.architecture, model.dtype, model.fingerprint)
    if (longest := max(len(text.encode()) for text in texts)) > MAX_TEXT_BYTES:
        raise MalformedMessage(f"attached: a text of {longest} bytes; {MAX_TEXT_BYTES} are allowed")


def _check_number(name: str, number: int, highest: int) -> None:
    if not 1 <= number <= highest:
        raise MalformedMessage(f"{name}: {number}, must be 1 to {highest}")


def _check_ids(name: str, ids: Items[int], lowest: int, highest: int) -> None:
    if not ids or len(set(ids)) != len(ids) or min(ids) < lowest or max(ids) > highest:
        raise MalformedMessage(f"lease.{name}: {len(ids)} ids, which must be distinct and in [{lowest}, {highest}]")


def decode_result(message: pb.StepResult, wanted: Items[int | None], scored: Items[tuple[int, int]] = ()) -> Result:
    """`wanted` has, for each sampling row of the plan, how many log-probabilities it asked for, or None; it is not
    looked at where the message has none. `scored` has, for each prompt that the plan's result tells of, how many of its
    tokens these are, and of how many alternatives."""
    tokens = _ints(message.sampled_ids)
    logprobs = _logprobs(message, wanted) if message.logprob_ids else None
    if not scored and not message.prompt_logprob_ids:
        return Result(message.step, tokens, logprobs)
    return Result(message.step, tokens, logprobs, _prompt_logprobs(message, scored))


def _prompt_logprobs(message: pb.StepResult, scored: Items[tuple[int, int]]) -> list[list[TokenLogprobs]]:
    columns = pb.StepResult(
        logprob_ids=message.prompt_logprob_ids,
        logprobs=message.prompt_logprobs,
        logprob_ranks=message.prompt_logprob_ranks,
    )
    entries = iter(_logprobs(columns, [k for count, k in scored for _ in range(count)]) or ())
    return [[entry for entry in islice(entries, count) if entry is not None] for count, _ in scored]


def _logprobs(message: pb.StepResult, wanted: Items[int | None]) -> LogprobColumn:
    counts = [0 if count is None else count + 1 for count in wanted]
    found, places = _ints(message.logprob_ids), _ints(message.logprob_ranks)
    if found.min(initial=0) < -1 or places.min(initial=0) < 0:
        raise MalformedMessage("result.logprob_ids: an id below -1, or a rank below 0")
    ids, ranks = found.tolist(), places.tolist()
    values = _columns(message.logprobs, FLOAT32).tolist()
    if not len(ids) == len(values) == sum(counts) or len(ranks) != len(counts) - counts.count(0):
        raise MalformedMessage(f"result.logprob_ids: {len(ids)} entries, {sum(counts)} were asked for")
    entries: list[TokenLogprobs | None] = []
    begin, remaining = 0, iter(ranks)
    for count in counts:
        end = begin + count
        entries.append(
            TokenLogprobs(values[begin], next(remaining), ids[begin + 1 : end], values[begin + 1 : end])
            if count
            else None
        )
        begin = end
    return entries


def _add_returned(message: pb.StepPlan, returned: Returned) -> None:
    message.returned_blocks, message.returned_rows = _bytes(returned.blocks), _bytes(returned.rows)
    message.returned_tokens_per_step = returned.tokens


def _demand(demand: Demand) -> pb.Demand:
    blocks, rows, tokens = demand.wants
    return pb.Demand(
        blocks=blocks,
        rows=rows,
        tokens_per_step=tokens,
        least_blocks=demand.least_blocks,
        least_rows=demand.least_rows,
        claim=demand.claim,
    )


def _started_row(start: StartedRow) -> pb.StartedRow:
    return pb.StartedRow(
        row=start.row,
        token_ids=_bytes(start.token_ids),
        num_prompt_tokens=start.num_prompt,
        num_computed_tokens=start.num_computed,
        blocks=_bytes(start.blocks),
        sampling=_row_sampling(start.sampling, start.end_token_ids),
        traceparent=start.traceparent,
    )


def _joined_row(joined: JoinedRow) -> pb.JoinedRow:
    sampling = _row_sampling(joined.sampling, joined.end_token_ids)
    return pb.JoinedRow(row=joined.row, like=joined.like, sampling=sampling)


def _row_sampling(sampling: Sampling, end_token_ids: tuple[int, ...]) -> pb.RowSampling:
    message = pb.RowSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        index=sampling.index,
        min_tokens=sampling.min_tokens,
        end_token_ids=end_token_ids,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )
    if sampling.rules is not NO_RULES:
        _add_rules(message, sampling.rules)
    return message


def _add_rules(message: pb.RowSampling, rules: TokenRules) -> None:
    if rules.logit_bias:
        ids, biases = zip(*rules.logit_bias, strict=True)
        message.bias_ids, message.biases = _bytes(list(ids)), np.array(biases, FLOAT32).tobytes()
    message.allowed_ids = _bytes(list(rules.allowed_ids))
    message.banned_ids = _bytes([token_id for sequence in rules.banned for token_id in sequence])
    message.banned_lengths = _bytes(list(map(len, rules.banned)))


def _bytes(values: np.ndarray | list[int]) -> bytes:
    return np.asarray(values, INT32).tobytes()


def _ints(data: bytes) -> np.ndarray:
    return _columns(data, INT32)


def _columns(data: bytes, dtype: np.dtype) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise MalformedMessage(f"a column of {len(data)} bytes is not a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype)
