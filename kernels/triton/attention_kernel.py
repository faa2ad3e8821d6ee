# mypy: disable-error-code="no-untyped-def"
"""What runs on the device for `paged_attention`: one kernel for prefill and decode, and the merge of a split context.

A program serves one tile of queries of one row, for the query heads that share one key/value head, over one part of
the row's context. The tile's matrix rows are (query, head of the group) pairs, so each key is read once for the
group. Everything that depends on values (which row, how long, which blocks) is found here, on the device.

The softmax is the online one (Milakov and Gimelshein 2018; Dao et al. 2022), in powers of two: scores carry a factor
log2(e). "Minus infinity" is the real one, for no finite number is below every score.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
MERGED_AT_ONCE = tl.constexpr(16)


@triton.jit
def first_tile(query_start, row, BLOCK_Q: tl.constexpr):
    """The number of a row's first tile. Rows need no more tiles than this leaves each; with one query a tile, all."""
    start = tl.load(query_start + row)
    if BLOCK_Q > 1:
        start = start // BLOCK_Q + row
    return start


@triton.jit
def row_of_tile(query_start, tile, num_rows, BLOCK_Q: tl.constexpr):
    """The last row whose first tile is not after `tile`; `num_rows` for the tokens behind every row."""
    low = 0
    high = num_rows
    if BLOCK_Q == 1:
        # In a batch of decode rows tile i is row i: one look instead of a search.
        guess = tl.minimum(tile, num_rows - 1)
        begin = tl.load(query_start + guess, mask=guess >= 0, other=0)
        end = tl.load(query_start + guess + 1, mask=guess >= 0, other=0)
        found = (begin <= tile) & (tile < end)
        low = tl.where(found, guess, low)
        high = tl.where(found, guess, high)
    while low < high:
        middle = (low + high + 1) // 2
        reached = first_tile(query_start, middle, BLOCK_Q) <= tile
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return low


@triton.jit
def finite_or_zero(top):
    """A maximum to subtract: where there is no key at all, exp2(-inf - 0) is 0 and exp2(-inf - -inf) would be NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def blocks_of(table, position, end, BLOCK_SIZE: tl.constexpr, HAS_TABLE: tl.constexpr):
    """The block of each position. From `end` on nothing is read, neither entry nor slot: both may hold anything.

    `table` is the row's, or without tables the row's first block, behind which its others lie in order.
    """
    if HAS_TABLE:
        block = tl.load(table + position // BLOCK_SIZE, mask=position < end, other=0).to(tl.int64)
    else:
        block = table + position // BLOCK_SIZE
    return block


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
    end = seen_end
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
    out_row = (token.to(tl.int64) * NUM_HEADS + head) * num_splits + split
    if SPLIT:
        num_tiles = tl.cdiv(tl.maximum(seen_end - begin, 0), TILE_N)
        part = tl.cdiv(num_tiles, num_splits) * TILE_N
        begin += split * part
        end = tl.minimum(begin + part, seen_end)
        if begin >= end:
            tl.store(tops + out_row, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=used)
            tl.store(totals + out_row, tl.zeros([BLOCK_M], tl.float32), mask=used)
            return

    q_row = q + token.to(tl.int64) * q_token_stride + head.to(tl.int64) * q_head_stride
    queries = tl.load(q_row[:, None] + d[None, :], mask=used[:, None] & (d < HEAD_DIM)[None, :], other=0.0).to(DOT)
    table = block_tables + row.to(tl.int64) * table_stride if HAS_TABLE else row.to(tl.int64) * table_stride
    keys_of_head = key_cache + kv_head.to(tl.int64) * key_head_stride
    values_of_head = value_cache + kv_head.to(tl.int64) * value_head_stride

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    attended = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    next_block = blocks_of(table, begin + tl.arange(0, TILE_N), end, BLOCK_SIZE, HAS_TABLE)
    for base in tl.range(begin, end, TILE_N):
        position = base + tl.arange(0, TILE_N)
        live = position < end
        # The table is read one step ahead: keys that wait for it in their own step could not be fetched early.
        block = next_block
        next_block = blocks_of(table, position + TILE_N, end, BLOCK_SIZE, HAS_TABLE)
        offset = (position % BLOCK_SIZE).to(tl.int64)

        key_row = keys_of_head + block * key_block_stride + offset * key_slot_stride
        key_mask = live[None, :] if HEAD_DIM == BLOCK_D else live[None, :] & (d < HEAD_DIM)[:, None]
        keys = tl.load(key_row[None, :] + d[:, None], mask=key_mask, other=0.0).to(DOT)
        scores = tl.dot(queries, keys, input_precision="ieee") * score_scale
        if HAS_CAP:
            # score_scale holds 2 log2(e) / cap, score_cap holds log2(e) cap: this is cap * tanh(score / cap).
            scores = score_cap - 2.0 * score_cap / (tl.exp2(scores) + 1.0)
        visible = position[None, :] <= query_position[:, None]
        if HAS_WINDOW:
            visible = visible & (position[None, :] > query_position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))

        new_top = tl.maximum(top, tl.max(scores, 1))
        subtracted = finite_or_zero(new_top)
        weights = tl.exp2(scores - subtracted[:, None])
        kept = tl.exp2(top - subtracted)
        total = total * kept + tl.sum(weights, 1)
        top = new_top

        value_row = values_of_head + block * value_block_stride + offset * value_slot_stride
        value_mask = live[:, None] if VALUE_DIM == BLOCK_V else live[:, None] & (dv < VALUE_DIM)[None, :]
        values = tl.load(value_row[:, None] + dv[None, :], mask=value_mask, other=0.0).to(DOT)
        attended = tl.dot(weights.to(DOT), values, attended * kept[:, None], input_precision="ieee")

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
