# mypy: disable-error-code="no-untyped-def"
"""Blocks that rows have in common, read once for all of them; and the merge with what each row has of its own.

A segment's members stand to it as a row's queries to the row: a program serves a tile of (member, head of the group)
pairs, for one key/value head, over one part of the segment.
"""

import triton
import triton.language as tl

from kernels.triton.positions import LOG2E, attend_positions, finite_or_zero, first_tile, part_of, row_of_tile

MERGED_AT_ONCE = tl.constexpr(16)
AFTER_ALL = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["window", "num_segments", "num_splits"])
def shared_kernel(
    q,
    key_cache,
    value_cache,
    block_tables,
    query_start,
    context_lens,
    first,  # [num_segments], as those of SharedBlocks
    end,
    row_start,
    rows,
    parts,  # [len(rows), NUM_HEADS, num_splits, VALUE_DIM] fp32, each part's own softmax
    tops,  # [len(rows), NUM_HEADS, num_splits] fp32: the part's largest score
    totals,  # as tops: its sum of exponentials below that
    score_scale,
    score_cap,
    window,
    num_segments,
    num_splits,
    q_token_stride,
    q_head_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    table_stride,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE_N: tl.constexpr,
    DOT: tl.constexpr,
):
    tile = tl.program_id(0)
    chunks: tl.constexpr = (GROUP + GROUP_TILE - 1) // GROUP_TILE
    kv_head = tl.program_id(1) // chunks
    chunk = tl.program_id(1) % chunks
    split = tl.program_id(2)

    segment = row_of_tile(row_start, tile, num_segments, BLOCK_Q)
    if segment >= num_segments:
        return
    members = tl.load(row_start + segment)
    members_end = tl.load(row_start + segment + 1)
    first_member = members + (tile - first_tile(row_start, segment, BLOCK_Q)) * BLOCK_Q
    if first_member >= members_end:
        return

    m = tl.arange(0, BLOCK_M)
    member = first_member + m // GROUP_TILE
    in_group = chunk * GROUP_TILE + m % GROUP_TILE
    used = (m < BLOCK_Q * GROUP_TILE) & (member < members_end) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    row = tl.load(rows + member, mask=used, other=0)
    token = tl.load(query_start + row, mask=used, other=0)
    query_position = tl.load(context_lens + row, mask=used, other=AFTER_ALL) - 1

    begin = tl.load(first + segment) * BLOCK_SIZE
    stop = tl.load(end + segment) * BLOCK_SIZE
    if HAS_WINDOW:
        begin = tl.maximum(begin, tl.min(query_position, 0) + 1 - window)
    begin, stop = part_of(begin, stop, split, num_splits, TILE_N)
    out_row = (member.to(tl.int64) * NUM_HEADS + head) * num_splits + split
    if begin >= stop:
        tl.store(tops + out_row, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=used)
        tl.store(totals + out_row, tl.zeros([BLOCK_M], tl.float32), mask=used)
        return

    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
    q_row = q + token.to(tl.int64) * q_token_stride + head.to(tl.int64) * q_head_stride
    queries = tl.load(q_row[:, None] + d[None, :], mask=used[:, None] & (d < HEAD_DIM)[None, :], other=0.0).to(DOT)
    top, total, attended = attend_positions(
        queries, query_position, tl.zeros([BLOCK_M], tl.int32) + stop - 1,
        block_tables + tl.load(rows + members).to(tl.int64) * table_stride, begin, stop,
        key_cache + kv_head.to(tl.int64) * key_head_stride,
        value_cache + kv_head.to(tl.int64) * value_head_stride,
        key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
        score_scale, score_cap, window,
        True, HAS_WINDOW, HAS_CAP, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_SIZE, BLOCK_M, TILE_N, DOT,
    )  # fmt: skip
    tl.store(tops + out_row, top, mask=used)
    tl.store(totals + out_row, total, mask=used)
    attended = attended / tl.where(total == 0.0, 1.0, total)[:, None]
    mask = used[:, None] & (dv < VALUE_DIM)[None, :]
    tl.store(parts + out_row[:, None] * VALUE_DIM + dv[None, :], attended, mask=mask)


@triton.jit
def add_parts(
    top, total, attended, parts, tops, totals, first_part, num_parts, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Join the `num_parts` parts from the one numbered `first_part` on to what has been joined so far."""
    dv = tl.arange(0, BLOCK_V)
    for base in tl.range(0, num_parts, MERGED_AT_ONCE):
        part = base + tl.arange(0, MERGED_AT_ONCE)
        place = first_part + part
        part_top = tl.load(tops + place, mask=part < num_parts, other=float("-inf"))
        part_total = tl.load(totals + place, mask=part < num_parts, other=0.0)
        new_top = tl.maximum(top, tl.max(part_top, 0))
        subtracted = finite_or_zero(new_top)
        kept = tl.exp2(top - subtracted)
        weights = tl.exp2(part_top - subtracted) * part_total
        # Not told by the largest score, which is -inf too where all are NaN: that must not get lost.
        mask = (part_total != 0.0)[:, None] & (dv < VALUE_DIM)[None, :]
        values = tl.load(parts + place[:, None] * VALUE_DIM + dv[None, :], mask=mask, other=0.0)
        total = total * kept + tl.sum(weights, 0)
        attended = attended * kept + tl.sum(weights[:, None] * values, 0)
        top = new_top
    return top, total, attended


@triton.jit(do_not_specialize=["num_rows", "num_splits", "num_shared_splits"])
def merge_shared_kernel(
    query_start,
    parts,  # [num_tokens, num_heads, num_splits, VALUE_DIM]: of what rows have of their own; as in merge_kernel
    tops,
    totals,
    shared_parts,  # [len(rows), num_heads, num_shared_splits, VALUE_DIM]: as shared_kernel leaves them
    shared_tops,
    shared_totals,
    places,  # SharedBlocks.by_row
    places_start,
    sinks,
    out,  # [num_tokens, num_heads, VALUE_DIM]
    num_rows,
    num_splits,
    num_shared_splits,
    HAS_SINKS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program joins the parts of one query and head, those of its row's segments first."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    dv = tl.arange(0, BLOCK_V)
    out_row = token.to(tl.int64) * num_heads + head
    top = float("-inf")
    total = 0.0
    attended = tl.zeros([BLOCK_V], tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks + head).to(tl.float32) * LOG2E
        total = 1.0
    row = row_of_tile(query_start, token, num_rows, 1)
    in_batch = row < num_rows
    first_place = tl.load(places_start + row, mask=in_batch, other=0)
    end_place = tl.load(places_start + row + 1, mask=in_batch, other=0)
    for place in tl.range(first_place, end_place):
        member = tl.load(places + place).to(tl.int64)
        top, total, attended = add_parts(
            top, total, attended, shared_parts, shared_tops, shared_totals,
            (member * num_heads + head) * num_shared_splits, num_shared_splits, VALUE_DIM, BLOCK_V,
        )  # fmt: skip
    if in_batch:
        top, total, attended = add_parts(
            top, total, attended, parts, tops, totals, out_row * num_splits, num_splits, VALUE_DIM, BLOCK_V
        )
    attended = attended / tl.where(total == 0.0, 1.0, total)
    tl.store(out + out_row * VALUE_DIM + dv, attended.to(out.dtype.element_ty), mask=dv < VALUE_DIM)
