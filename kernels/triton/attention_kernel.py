# mypy: disable-error-code="no-untyped-def"
"""What runs on the device for `paged_attention`: one kernel for prefill and decode, and the merge of a split context.

A program serves one tile of queries of one row, for the query heads that share one key/value head, over one part of
the row's context. The tile's matrix rows are (query, head of the group) pairs, so each key is read once for the
group. Everything that depends on values (which row, how long, which blocks) is found here, on the device.
"""

import triton
import triton.language as tl

from kernels.triton.positions import LOG2E, attend_positions, finite_or_zero, first_tile, part_of, row_of_tile

MERGED_AT_ONCE = tl.constexpr(16)


@triton.jit(
    do_not_specialize=["window", "max_context", "num_tokens", "num_rows", "num_splits"],
)
def attention_kernel(
    q,
    key_cache,
    value_cache,
    block_tables,  # None without HAS_TABLE: row i has the blocks from i * table_stride on
    query_start,
    context_lens,
    own_start,  # the block of its table that a row begins with; only with HAS_SHARED
    sinks,
    out,  # [num_tokens, NUM_HEADS, num_splits, VALUE_DIM]
    tops,  # [num_tokens, NUM_HEADS, num_splits] fp32: the part's largest score; only with SPLIT
    totals,  # as tops: its sum of exponentials below that
    score_scale,
    score_cap,
    window,
    max_context,
    num_tokens,
    num_rows,
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
    HAS_TABLE: tl.constexpr,  # always, but to measure what a table costs
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads that share a key/value head
    GROUP_TILE: tl.constexpr,  # those of them in one tile
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM, rounded up to a power of two
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # slots of a cache block
    BLOCK_M: tl.constexpr,  # matrix rows of a tile
    BLOCK_Q: tl.constexpr,  # queries of a tile
    TILE_N: tl.constexpr,  # positions of a step through the context
    DOT: tl.constexpr,  # dtype of both products' factors
):
    # Later tiles of a row see more keys: start with them.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    chunks: tl.constexpr = (GROUP + GROUP_TILE - 1) // GROUP_TILE
    kv_head = tl.program_id(1) // chunks
    chunk = tl.program_id(1) % chunks
    split = tl.program_id(2)

    row = row_of_tile(query_start, tile, num_rows, BLOCK_Q)
    in_batch = row < num_rows
    row_end = tl.load(query_start + row + 1, mask=in_batch, other=num_tokens)
    context = tl.load(context_lens + row, mask=in_batch, other=0)
    first_token = tl.load(query_start + row) + (tile - first_tile(query_start, row, BLOCK_Q)) * BLOCK_Q
    if first_token >= row_end:
        return

    # Matrix rows: which query, which head. Those of a padded tile belong to nobody and are never stored.
    m = tl.arange(0, BLOCK_M)
    token = first_token + m // GROUP_TILE
    in_group = chunk * GROUP_TILE + m % GROUP_TILE
    used = (m < BLOCK_Q * GROUP_TILE) & (token < row_end) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    query_position = context - row_end + token

    # The positions that any of the tile's queries sees, and this program's part of them.
    last_token = tl.minimum(first_token + BLOCK_Q, row_end) - 1
    seen_end = tl.minimum(context - row_end + last_token + 1, max_context)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(context - row_end + first_token + 1 - window, 0)
    if HAS_SHARED:
        # What comes before has been attended to with the other rows that have it.
        begin = tl.maximum(begin, tl.load(own_start + row, mask=in_batch, other=0) * BLOCK_SIZE)
    end = seen_end
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
    out_row = (token.to(tl.int64) * NUM_HEADS + head) * num_splits + split
    if SPLIT:
        begin, end = part_of(begin, seen_end, split, num_splits, TILE_N)
        if begin >= end:
            tl.store(tops + out_row, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=used)
            tl.store(totals + out_row, tl.zeros([BLOCK_M], tl.float32), mask=used)
            return

    q_row = q + token.to(tl.int64) * q_token_stride + head.to(tl.int64) * q_head_stride
    queries = tl.load(q_row[:, None] + d[None, :], mask=used[:, None] & (d < HEAD_DIM)[None, :], other=0.0).to(DOT)
    table = block_tables + row.to(tl.int64) * table_stride if HAS_TABLE else row.to(tl.int64) * table_stride

    top, total, attended = attend_positions(
        queries, query_position, query_position, table, begin, end,
        key_cache + kv_head.to(tl.int64) * key_head_stride,
        value_cache + kv_head.to(tl.int64) * value_head_stride,
        key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
        score_scale, score_cap, window,
        HAS_TABLE, HAS_WINDOW, HAS_CAP, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_SIZE, BLOCK_M, TILE_N, DOT,
    )  # fmt: skip

    if SPLIT:
        # Not as one logarithm: next to a score of 1e5 its last bits would be lost, and weights be wrong by percents.
        tl.store(tops + out_row, top, mask=used)
        tl.store(totals + out_row, total, mask=used)
    elif HAS_SINKS:
        sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * LOG2E
        subtracted = finite_or_zero(tl.maximum(top, sink))
        kept = tl.exp2(top - subtracted)
        total = total * kept + tl.exp2(sink - subtracted)
        attended = attended * kept[:, None]
    attended = attended / tl.where(total == 0.0, 1.0, total)[:, None]
    out_mask = used[:, None] & (dv < VALUE_DIM)[None, :]
    tl.store(out + out_row[:, None] * VALUE_DIM + dv[None, :], attended.to(out.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    parts,  # [num_tokens, num_heads, num_splits, VALUE_DIM] fp32, each part's own softmax
    tops,  # [num_tokens, num_heads, num_splits] fp32, in powers of two
    totals,  # as tops; 0: no key is seen, and what `parts` holds there may never have been written
    sinks,
    out,  # [num_tokens, num_heads, VALUE_DIM]
    num_splits,
    HAS_SINKS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_S: tl.constexpr,  # num_splits, rounded up to a power of two and to MERGED_AT_ONCE
):
    """One program joins the parts of one query and head, each weighted by its sum of exponentials."""
    head = tl.program_id(1)
    out_row = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head
    dv = tl.arange(0, BLOCK_V)
    all_parts = tl.arange(0, BLOCK_S)
    top = tl.max(tl.load(tops + out_row * num_splits + all_parts, mask=all_parts < num_splits, other=float("-inf")), 0)
    sink = float("-inf")
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    subtracted = finite_or_zero(top)
    total = 0.0
    if HAS_SINKS:
        total += tl.exp2(sink - subtracted)
    attended = tl.zeros([BLOCK_V], tl.float32)
    for base in tl.range(0, num_splits, MERGED_AT_ONCE):
        part = base + tl.arange(0, MERGED_AT_ONCE)
        rows = out_row * num_splits + part
        part_top = tl.load(tops + rows, mask=part < num_splits, other=float("-inf"))
        part_total = tl.load(totals + rows, mask=part < num_splits, other=0.0)
        # Not told by the largest score, which is -inf too where all are NaN: that must not get lost.
        seen = part_total != 0.0
        weights = tl.exp2(part_top - subtracted) * part_total
        total += tl.sum(weights, 0)
        mask = seen[:, None] & (dv < VALUE_DIM)[None, :]
        values = tl.load(parts + rows[:, None] * VALUE_DIM + dv[None, :], mask=mask, other=0.0)
        attended += tl.sum(weights[:, None] * values, 0)
    attended = attended / tl.where(total == 0.0, 1.0, total)
    tl.store(out + out_row * VALUE_DIM + dv, attended.to(out.dtype.element_ty), mask=dv < VALUE_DIM)
