"""Attention over a paged cache, the kernels: items of tiles walk pieces, and partials are merged.

The recipe, one for all rows: positions in pieces of 256, aligned to absolute position (under a
window too); within a piece, tiles of BLOCK_N positions with a running maximum, in base 2;
probabilities are rounded to the query's dtype before the product with V; pieces are merged in
order. A tile or piece of which a row sees nothing leaves that row's bits as they are, and what a
position holds reaches only rows that see it, NaN too. So a row's bits depend on its query, its
cache and its position. They may depend on BLOCK_M too, where the chip's matrix instructions for
16 and for 64 rows add in different orders; 64 and 128 use the same instruction.

Sums are explicit fused multiply-adds, so that a compiler has no choice that could differ between
the kernel that merges in registers and the one that merges partials. Knows no batch: what to do
is in the items (attention_plan.py). Letters: M query rows, N positions of a tile, D columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.execute.gpu.kernels.rounding import as_type, dot

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attention_items(
    q_ptr,
    values_ptr,
    scales_ptr,
    y_ptr,
    sinks_ptr,
    partial_y_ptr,
    partial_sums_ptr,
    items_ptr,
    positions_ptr,
    tables_ptr,
    q_stride,
    y_stride,
    table_stride,
    block_stride,
    scale_block_stride,
    score_scale,
    soft_cap,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PIECE: tl.constexpr,
    PARTIAL_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_CUT: tl.constexpr,
):
    """One item of one KV head; programs are items x KV heads, heads first."""
    program = tl.program_id(0)
    kv_head = program % KV_HEADS
    item_ptr = items_ptr + (program // KV_HEADS) * 6
    num_tokens = tl.load(item_ptr + 2)
    if num_tokens == 0:
        return
    row = tl.load(item_ptr + 1)
    first_piece = tl.load(item_ptr + 3)
    partial = tl.load(item_ptr + 5)
    first_position = tl.load(positions_ptr + row)
    last_position = first_position + num_tokens - 1
    table_ptr = tables_ptr + tl.load(item_ptr).to(tl.int64) * table_stride

    rows = tl.arange(0, BLOCK_M)
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    columns = tl.arange(0, HEAD_PAD)
    is_kept = (token < num_tokens)[:, None] & (columns < HEAD_DIM)[None, :]
    position = first_position + token
    q_rows = (row + token).to(tl.int64) * q_stride + head * HEAD_DIM
    q = tl.load(q_ptr + q_rows[:, None] + columns[None, :], mask=is_kept, other=0.0)

    # What all of the tile's rows see is [full_from, full_to): no masks there.
    begin = first_piece * PIECE
    end = tl.minimum(tl.load(item_ptr + 4) * PIECE, last_position + 1)
    seen_from = 0
    full_from = begin
    if HAS_WINDOW:
        seen_from = tl.maximum(first_position - window + 1, 0)
        begin = tl.maximum(begin, seen_from // BLOCK_N * BLOCK_N)
        all_from = tl.maximum(last_position - window + 1, 0)
        full_from = tl.maximum(begin, (all_from + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
    full_to = tl.minimum(end, first_position + 1) // BLOCK_N * BLOCK_N
    full_to = tl.maximum(full_from, full_to)

    values_ptr += kv_head * (BLOCK_SIZE * HEAD_DIM)
    scales_ptr += kv_head * BLOCK_SIZE
    partial_rows = kv_head * PARTIAL_ROWS + rows
    # In base 2: a score times this is the exponent.
    factor = LOG2E if HAS_CAP else score_scale * LOG2E

    highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    y = tl.zeros((BLOCK_M, HEAD_PAD), tl.float32)
    piece_highest, piece_total, piece_y = highest, total, y
    # Before, within and after what all rows see.
    for part in tl.static_range(0, 3):
        if part > 0 or HAS_WINDOW:
            part_from = begin if part == 0 else (full_from if part == 1 else full_to)
            part_to = end if part == 2 else tl.minimum(full_to if part == 1 else full_from, end)
            for start in tl.range(part_from, part_to, BLOCK_N):
                scores, v, v_scale, is_seen = _read_tile(
                    start, q, position, values_ptr, scales_ptr, table_ptr,
                    block_stride, scale_block_stride, seen_from, last_position,
                    window, score_scale, soft_cap, KV_HEADS, HEAD_DIM, HEAD_PAD,
                    BLOCK_SIZE, BLOCK_N, HAS_SCALES, HAS_WINDOW, HAS_CAP, part != 1,
                )  # fmt: skip
                # A piece is closed when the next one has its first scores, and not sooner: what
                # the matrix unit still adds to the piece is waited for together with these.
                if (start % PIECE == 0) & (start > begin):
                    highest, total, y = _close_piece(
                        highest, total, y, piece_highest, piece_total, piece_y,
                        partial, start // PIECE - 1 - first_piece, partial_y_ptr,
                        partial_sums_ptr, partial_rows, num_tokens, token, columns, is_kept,
                        KV_HEADS, HEAD_DIM, PARTIAL_ROWS, IS_CUT,
                    )  # fmt: skip
                    piece_highest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
                    piece_total = tl.zeros((BLOCK_M,), tl.float32)
                    piece_y = tl.zeros((BLOCK_M, HEAD_PAD), tl.float32)
                piece_highest, piece_total, piece_y = _see_tile(
                    scores, v, v_scale, is_seen, piece_highest, piece_total, piece_y,
                    factor, q.dtype, HAS_SCALES, part != 1,
                )  # fmt: skip
    highest, total, y = _close_piece(
        highest, total, y, piece_highest, piece_total, piece_y,
        partial, (end - 1) // PIECE - first_piece, partial_y_ptr,
        partial_sums_ptr, partial_rows, num_tokens, token, columns, is_kept,
        KV_HEADS, HEAD_DIM, PARTIAL_ROWS, IS_CUT,
    )  # fmt: skip

    if IS_CUT:  # where the result is in partials nothing is stored here
        num_tokens = tl.where(partial < 0, num_tokens, 0)
        is_kept = (token < num_tokens)[:, None] & (columns < HEAD_DIM)[None, :]
    sink = tl.load(sinks_ptr + head, mask=token < num_tokens, other=0.0) if HAS_SINKS else highest
    y = finished(highest, total, y, sink, HAS_SINKS)
    y_rows = (row + token).to(tl.int64) * y_stride + head * HEAD_DIM
    y = as_type(y, y_ptr.dtype.element_ty)
    tl.store(y_ptr + y_rows[:, None] + columns[None, :], y, mask=is_kept)


@triton.jit
def _close_piece(
    highest,
    total,
    y,
    piece_highest,
    piece_total,
    piece_y,
    partial,
    nth,
    partial_y_ptr,
    partial_sums_ptr,
    partial_rows,
    num_tokens,
    token,
    columns,
    is_kept,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTIAL_ROWS: tl.constexpr,
    IS_CUT: tl.constexpr,
):
    """Return the sums so far with those of the item's nth piece; where the item is one of several
    of its tile these are stored instead."""
    is_merged = True
    if IS_CUT:
        is_merged = partial < 0
        if partial >= 0:
            slot_rows = (partial + nth).to(tl.int64) * (KV_HEADS * PARTIAL_ROWS) + partial_rows
            tl.store(partial_sums_ptr + slot_rows * 2, piece_highest, mask=token < num_tokens)
            tl.store(partial_sums_ptr + slot_rows * 2 + 1, piece_total, mask=token < num_tokens)
            out = partial_y_ptr + slot_rows[:, None] * HEAD_DIM + columns[None, :]
            tl.store(out, piece_y, mask=is_kept)
    if is_merged:
        highest, total, y = merge_piece(highest, total, y, piece_highest, piece_total, piece_y)
    return highest, total, y


@triton.jit
def merge_partials(
    partial_y_ptr,
    partial_sums_ptr,
    y_ptr,
    sinks_ptr,
    merges_ptr,
    positions_ptr,
    y_stride,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    PIECE: tl.constexpr,
    PARTIAL_ROWS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One head of one row from the partials of its pieces, in order."""
    program = tl.program_id(0)
    head = program % (KV_HEADS * GROUP)
    merge_ptr = merges_ptr + (program // (KV_HEADS * GROUP)) * 3
    row = tl.load(merge_ptr)
    if row < 0:
        return
    first_partial = tl.load(merge_ptr + 1)
    place = tl.load(merge_ptr + 2) * GROUP + head % GROUP
    position = tl.load(positions_ptr + row)
    first_piece = 0
    if HAS_WINDOW:
        first_piece = tl.maximum(position - window + 1, 0) // PIECE

    one = tl.arange(0, 1)
    columns = tl.arange(0, HEAD_PAD)[None, :]
    highest = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    y = tl.zeros((1, HEAD_PAD), tl.float32)
    for piece in tl.range(first_piece, position // PIECE + 1):
        slot = (first_partial + piece).to(tl.int64) * KV_HEADS + head // GROUP
        slot_row = slot * PARTIAL_ROWS + place
        piece_highest = tl.load(partial_sums_ptr + slot_row * 2 + one)
        piece_total = tl.load(partial_sums_ptr + slot_row * 2 + 1 + one)
        piece_ptr = partial_y_ptr + slot_row * HEAD_DIM + columns
        piece_y = tl.load(piece_ptr, mask=columns < HEAD_DIM, other=0.0)
        highest, total, y = merge_piece(highest, total, y, piece_highest, piece_total, piece_y)
    sink = tl.load(sinks_ptr + head + one) if HAS_SINKS else highest
    y = as_type(finished(highest, total, y, sink, HAS_SINKS), y_ptr.dtype.element_ty)
    out = y_ptr + row.to(tl.int64) * y_stride + head * HEAD_DIM + columns
    tl.store(out, y, mask=columns < HEAD_DIM)


@triton.jit
def merge_piece(highest, total, y, piece_highest, piece_total, piece_y):
    """Return a row's sums so far [M], [M], [M, D], and those of its next piece, as one."""
    both = tl.maximum(highest, piece_highest)
    level = tl.where(both == float("-inf"), 0.0, both)
    kept = tl.exp2(highest - level)
    added = tl.exp2(piece_highest - level)
    total = tl.fma(total, kept, piece_total * added)
    y = tl.fma(y, kept[:, None], piece_y * added[:, None])
    return both, total, y


@triton.jit
def finished(highest, total, y, sink, HAS_SINKS: tl.constexpr):
    """Return what attention gives; a sink is a score of its head that no position has."""
    if HAS_SINKS:
        sink = sink * LOG2E
        level = tl.maximum(highest, sink)
        kept = tl.exp2(highest - level)
        total = tl.fma(total, kept, tl.exp2(sink - level))
        y = y * kept[:, None]
    return y / total[:, None]


@triton.jit
def _read_tile(
    start,
    q,
    position,
    values_ptr,
    scales_ptr,
    table_ptr,
    block_stride,
    scale_block_stride,
    seen_from,
    last_position,
    window,
    score_scale,
    soft_cap,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Of positions [start, start + BLOCK_N): scores, V, its scales, and which row sees which; of
    the last two only what `_see_tile` looks at."""
    cached = start + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, HEAD_PAD)
    is_filled = (cached >= seen_from) & (cached <= last_position)
    if BLOCK_SIZE % BLOCK_N == 0:  # one block: its id is read once
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        place = start % BLOCK_SIZE + tl.arange(0, BLOCK_N)
    else:
        if IS_MASKED:
            block = tl.load(table_ptr + cached // BLOCK_SIZE, mask=is_filled, other=0).to(tl.int64)
        else:
            block = tl.load(table_ptr + cached // BLOCK_SIZE).to(tl.int64)
        place = cached % BLOCK_SIZE
    kv = values_ptr + (block * block_stride + place * HEAD_DIM)[:, None] + columns[None, :]
    kv_values = KV_HEADS * BLOCK_SIZE * HEAD_DIM  # from keys to values
    if IS_MASKED:
        is_loaded = is_filled[:, None] & (columns < HEAD_DIM)[None, :]
        k = tl.load(kv, mask=is_loaded, other=0.0)
        v = tl.load(kv + kv_values, mask=is_loaded, other=0.0)
    elif HEAD_DIM < HEAD_PAD:
        is_column = (columns < HEAD_DIM)[None, :]
        k = tl.load(kv, mask=is_column, other=0.0)
        v = tl.load(kv + kv_values, mask=is_column, other=0.0)
    else:
        k = tl.load(kv)
        v = tl.load(kv + kv_values)

    none = tl.zeros((q.shape[0], BLOCK_N), tl.float32)
    v_scale, is_seen = is_filled, is_filled
    scores = dot(q, tl.trans(_exactly(k, q.dtype)), none)
    if HAS_SCALES:
        scale_ptr = scales_ptr + block * scale_block_stride + place
        if IS_MASKED:
            k_scale = tl.load(scale_ptr, mask=is_filled, other=0.0)
            v_scale = tl.load(scale_ptr + KV_HEADS * BLOCK_SIZE, mask=is_filled, other=0.0)
        else:
            k_scale = tl.load(scale_ptr)
            v_scale = tl.load(scale_ptr + KV_HEADS * BLOCK_SIZE)
        scores = scores * k_scale[None, :]
    if HAS_CAP:
        scores = soft_cap * _tanh(scores * (score_scale / soft_cap))
    if IS_MASKED:
        is_seen = is_filled[None, :] & (cached[None, :] <= position[:, None])
        if HAS_WINDOW:
            is_seen = is_seen & (cached[None, :] > position[:, None] - window)
        scores = tl.where(is_seen, scores, float("-inf"))
    return scores, v, v_scale, is_seen


@triton.jit
def _see_tile(
    scores,
    v,
    v_scale,
    is_seen,
    highest,
    total,
    y,
    factor,
    dtype: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Return the sums of a piece after the positions of a tile."""
    both = tl.maximum(highest, tl.max(scores, 1) * factor)
    level = tl.where(both == float("-inf"), 0.0, both)
    kept = tl.exp2(highest - level)
    weights = tl.exp2(tl.fma(scores, factor, -level[:, None]))
    total = tl.fma(total, kept, tl.sum(weights, 1))
    y = y * kept[:, None]
    if HAS_SCALES:
        weights = weights * v_scale[None, :]
        if IS_MASKED:  # no weight times a scale that is NaN
            weights = tl.where(is_seen, weights, 0.0)
    elif IS_MASKED:
        # No weight is zero times NaN or infinity either: rows that see such a value are NaN, and
        # others are as if it were not there.
        wide = v.to(tl.float32)
        is_finite = tl.abs(wide) < float("inf")
        is_broken = tl.max(tl.where(is_finite, 0, 1), 1)
        sees_broken = tl.max(tl.where(is_seen, is_broken[None, :], 0), 1)
        y = tl.where(sees_broken[:, None] != 0, float("nan"), y)
        v = tl.where(is_finite, wide, 0.0).to(v.dtype)
    y = dot(as_type(weights, dtype), _exactly(v, dtype), y)
    return both, total, y


@triton.jit
def _exactly(x, dtype: tl.constexpr):
    """Return what a cache holds as floats of the products' type, which has all of its values."""
    if x.dtype == dtype:
        return x
    return as_type(x.to(tl.float32), dtype)


@triton.jit
def _tanh(x):
    """-1 and 1 far out, everywhere within 1e-7 of tanh: a score under a cap needs no more, and
    it is a few instructions."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
