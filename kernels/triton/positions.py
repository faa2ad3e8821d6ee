# mypy: disable-error-code="no-untyped-def"
"""What the attention kernels are made of: which tile is whose, and the way of a tile of queries along some positions.

The softmax is the online one (Milakov and Gimelshein 2018; Dao et al. 2022), in powers of two: scores carry a factor
log2(e). "Minus infinity" is the real one, for no finite number is below every score.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


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
def part_of(begin, end, split, num_splits, TILE_N: tl.constexpr):
    """The positions of one part, whole steps of TILE_N each but the last; with `begin` not below `end`, none."""
    part = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), TILE_N), num_splits) * TILE_N
    begin += split * part
    return begin, tl.minimum(begin + part, end)


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


@triton.jit
def attend_positions(
    queries,  # [BLOCK_M, BLOCK_D] in DOT
    query_position,  # [BLOCK_M]; the window ends there
    last_position,  # [BLOCK_M]; nothing is seen behind it
    table,  # as in blocks_of
    begin,
    end,
    keys_of_head,
    values_of_head,
    key_block_stride,
    key_slot_stride,
    value_block_stride,
    value_slot_stride,
    score_scale,
    score_cap,
    window,
    HAS_TABLE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE_N: tl.constexpr,
    DOT: tl.constexpr,
):
    """Each query's largest score, its sum of exponentials below that, and the values weighted by these, of the
    positions in begin : end that it sees. All fp32, the last `[BLOCK_M, BLOCK_V]`."""
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_V)
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
        visible = position[None, :] <= last_position[:, None]
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
    return top, total, attended
