"""Requests as those who look on are told of them: where they stand and which blocks they hold, never what they say."""

import time
from collections.abc import Iterable, Iterator, Mapping

from paged.v1 import control_pb2
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.core.state import CoreState
from scheduler_svc.samples import Samples

MAX_TABLES = 64  # of one request
MAX_TABLE_BLOCKS = 4096  # of one table: the last of them

LiveRequest = control_pb2.LiveRequest


def in_order(requests: Iterable[Samples]) -> list[Samples]:
    """Those that have blocks before those that have none, otherwise as they were."""
    waiting: list[Samples] = []
    running: list[Samples] = []
    for samples in requests:
        (running if any(True for _ in _running(samples)) else waiting).append(samples)
    return running + waiting


def live_request(request_id: str, samples: Samples, endpoints: Mapping[Scheduler, str]) -> LiveRequest:
    """`endpoints` are those of the executors that are known."""
    first, running = samples.first, list(_running(samples))
    group = first.group
    if group is None:
        num_generated = sum(answer.sequence.num_output for answer in samples.answers)
    else:
        num_generated = group.search.num_tokens * first.num_rows
    num_blocks = sum(int(_state(sequence).columns.num_blocks[sequence.row]) for sequence in running)
    return LiveRequest(
        request_id=request_id,
        state=_stage(samples, running),
        model=samples.model,
        executor="" if first.scheduler is None else endpoints.get(first.scheduler, ""),
        tenant=first.tenant,
        priority=first.priority,
        prompt_tokens=first.num_prompt,
        cached_prompt_tokens=first.num_cached or 0,
        generated_tokens=num_generated,
        sequences=len(samples.answers) if group is None else first.num_rows,
        running_sequences=len(running),
        table_blocks=num_blocks,
        age_ms=round((time.perf_counter() - samples.opened_at) * 1000),
    )


def block_tables(samples: Samples) -> list[control_pb2.BlockTable]:
    """Of its sequences that have blocks, as many as are told."""
    return [_table(sequence) for sequence, _ in zip(_running(samples), range(MAX_TABLES), strict=False)]


def _table(sequence: Sequence) -> control_pb2.BlockTable:
    state = _state(sequence)
    columns, counts, row = state.columns, state.cache.pool.ref_count, sequence.row
    blocks = columns.table(row)
    num_skipped = max(len(blocks) - MAX_TABLE_BLOCKS, 0)
    told = blocks[num_skipped:]
    group = sequence.group
    return control_pb2.BlockTable(
        index=sequence.sampling.index if group is None else group.beams.index(sequence),
        tokens=int(columns.num_tokens[row]),
        computed_tokens=int(min(columns.num_computed[row], columns.num_tokens[row])),  # not those being drawn
        skipped_blocks=num_skipped,
        blocks=told,
        counts=[counts[block] for block in told],
    )


def _running(samples: Samples) -> Iterator[Sequence]:
    """Its sequences that have rows; of a beam search, the beams."""
    group = samples.first.group
    members = [answer.sequence for answer in samples.answers] if group is None else group.beams
    return (sequence for sequence in members if sequence.state is State.RUNNING and sequence.row >= 0)


def _stage(samples: Samples, running: list[Sequence]) -> control_pb2.LiveRequest.State:
    if not running:
        over = all(answer.sequence.state is State.ENDED for answer in samples.answers)
        return LiveRequest.STATE_ENDED if over else LiveRequest.STATE_WAITING
    decodes = any(_has_caught_up(sequence) for sequence in running)
    return LiveRequest.STATE_DECODE if decodes else LiveRequest.STATE_PREFILL


def _has_caught_up(sequence: Sequence) -> bool:
    """Whether at most its newest token lacks its place in the blocks."""
    columns, row = _state(sequence).columns, sequence.row
    return bool(columns.num_computed[row] >= columns.num_tokens[row] - 1)


def _state(sequence: Sequence) -> CoreState:
    handle = sequence if sequence.group is None else sequence.group.handle
    if handle.scheduler is None:
        raise RuntimeError(f"{sequence.request_id}: runs, and no scheduler was given it")
    return handle.scheduler.state
