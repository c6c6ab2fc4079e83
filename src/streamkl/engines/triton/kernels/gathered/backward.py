"""The backward pass over selected keys.

A program owns one query and a part of its heads: their dQ and dW stay in registers during the walk over its selected
keys. Any query may select a key, so dK is accumulated in float32, in no fixed order. The pass also sums the losses of
`train`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.gathered.selected import (
    gathered_logits,
    gathered_target,
    group_row,
    my_query,
    my_selection,
    own_rows,
    seen_columns,
    selected_keys,
    weighted_sum,
)
from streamkl.engines.triton.kernels.groups import Piece, RowStatPtrs, TileA, TileB
from streamkl.engines.triton.kernels.tile.gradient import (
    derivative_a,
    derivative_b,
    finite_rows,
    gradient_factors,
    head_derivative,
    load_rows,
    loss_terms,
    relu_threshold,
    store_rows,
    tile_of_a,
    weight_terms,
)
from streamkl.engines.triton.kernels.tile.products import (
    activated,
    dot,
    dot_add,
    gradient_columns,
    head_weights,
    held,
    log2_probabilities,
    product,
    rounded,
    unheld,
    weight_pointers,
    zeros,
)
from streamkl.engines.triton.kernels.tile.states import NONE, SMALLEST
from streamkl.engines.triton.kernels.tile.tiles import row_pointers


@triton.jit
def gathered_gradient_kernel(
    a,
    b,
    stats,
    topk,
    support,
    out,
    counts,
    A: tl.constexpr,
    B: tl.constexpr,
    GROUP: tl.constexpr,
    MASK: tl.constexpr,
    ROWS: tl.constexpr,
    TARGET_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WANT: tl.constexpr,
):
    """DQ, dW and the query's contribution to dK: of one of the parts of a head pack, one of the pieces of the columns.

    Head by head (``B.heads == 0``) the rows of a tile are distributions. Against a head mean they are the ``B.heads``
    heads of one distribution, ``[1, KEYS]``, which all have its derivative.
    """
    PAIRED: tl.constexpr = B.heads == 0
    DISTRIBUTIONS: tl.constexpr = ROWS if PAIRED else 1
    HEADS: tl.constexpr = GROUP.pack if PAIRED else B.heads
    work, sequence, query = my_query(counts, counts.parts * counts.pieces, support, MASK)
    column_piece = work.part % counts.pieces
    part = work.part // counts.pieces
    heads = own_rows(part, work.head_pack, query, sequence, support.nq, counts.head_packs, HEADS, ROWS)
    rows = heads
    if not PAIRED:
        rows = own_rows(part * 0, work.head_pack, query, sequence, support.nq, counts.head_packs, 1, 1)
    first_head = work.head_pack * GROUP.pack
    token = sequence.q_start + query
    selection = my_selection(topk, first_head, query, sequence)
    values = load_rows(stats, rows, WANT, PAIRED, True)  # [DISTRIBUTIONS]
    seen = seen_columns(selection, sequence, support, MASK)
    seen = tl.where(tl.max(values.live.to(tl.int32), 0) > 0, seen, 0)

    kv_a = first_head // A.per_kv
    if not PAIRED:
        kv_a = work.head_pack * 0  # `gathered_target` walks the key heads itself
    k_ptrs_a = row_pointers(a.k, sequence.batch, kv_a, sequence.k_start)
    k_ptrs_b = row_pointers(b.k, sequence.batch, first_head // B.per_kv, sequence.k_start)
    q_ptrs_a = row_pointers(a.q, sequence.batch, rows.heads * GROUP.size, token)
    q_ptrs_b = row_pointers(b.q, sequence.batch, heads.heads, token)
    piece = Piece(column_piece * A.grad, column_piece * B.grad, column_piece == 0)
    live_heads = heads.exist & values.live  # [ROWS]
    if PAIRED:
        q_a = held(q_ptrs_a, finite_rows(values.live, values.m_a, WANT.a), a.q, A, True)  # [ROWS, BLOCK]
    else:
        q_a = unheld(q_ptrs_a, values.live, a.q)
    q_b = held(q_ptrs_b, finite_rows(live_heads, values.m_b, WANT.b), b.q, B, True)  # [ROWS, BLOCK]
    w_ptr = weight_pointers(b, sequence.batch, work.head_pack * B.heads, token, B)
    w, dw = 0, 0.0
    if B.weighted:
        w = head_weights(row_pointers(b.w, sequence.batch, heads.heads, token), live_heads)  # [ROWS]
        dw = tl.zeros([ROWS], tl.float32)
    factors = gradient_factors(a, b, stats, B, WANT)
    dq_a, dq_b, q_columns_a, q_columns_b = 0.0, 0.0, 0, 0
    if WANT.a:
        dq_a = zeros(ROWS, A.grad)
        q_columns_a = gradient_columns(q_a, piece.first_a, A, True)  # [ROWS, GRAD]
    if WANT.b:
        dq_b = zeros(ROWS, B.grad)
        q_columns_b = gradient_columns(q_b, piece.first_b, B, True)  # [ROWS, GRAD]
    all_heads = counts.head_packs * GROUP.pack
    dk_index_a = sequence.batch.to(tl.int64) * (all_heads // A.per_kv) + first_head // A.per_kv
    dk_index_a = dk_index_a * support.nk + sequence.k_start
    dk_index_b = sequence.batch.to(tl.int64) * (all_heads // B.per_kv) + first_head // B.per_kv
    dk_index_b = dk_index_b * support.nk + sequence.k_start
    index_a = group_row(work.head_pack, query, sequence, support.nq, counts.head_packs, GROUP)
    stats_a = RowStatPtrs(stats.a.m + index_a, stats.a.log2_l + index_a)
    sum_p = tl.zeros([DISTRIBUTIONS], tl.float32)
    sum_acc = tl.zeros([DISTRIBUTIONS], tl.float32)
    for first in range(0, seen, KEYS):
        columns = first + tl.arange(0, KEYS)
        keys, exist = selected_keys(selection, columns, sequence, support, MASK)  # [KEYS]
        allowed = exist[None, :]
        key_ptrs_a = k_ptrs_a + keys * a.k.stride_token
        if PAIRED:
            k_a = held(key_ptrs_a, exist, a.k, A, True)  # [KEYS, BLOCK]
            tile_a = tile_of_a(q_a, k_a, stats_a, values, allowed, first_head, support.nq, a, A, GROUP, True, True)
        else:
            k_a = unheld(key_ptrs_a, exist, a.k)
            p = gathered_target(
                q_ptrs_a,
                stats_a,
                values.live,
                k_a,
                a,
                work.head_pack * GROUP.size,
                support.nq,
                TARGET_ROWS,
                A,
                GROUP,
            )  # [1, KEYS]
            tile_a = TileA(p, p, tl.log2(tl.maximum(p, SMALLEST)), p)  # the logarithm of a mean over one head

        k_b = held(k_ptrs_b + keys * b.k.stride_token, exist, b.k, B, True)  # [KEYS, BLOCK]
        products_b = product(q_b, k_b, b.dim, B, True)  # [ROWS, KEYS]
        head_x = activated(products_b, b.scale, B)
        if PAIRED:
            x_b = head_x
        elif B.heads <= ROWS:
            x_b = weighted_sum(head_x, w, heads.exist, ROWS, B)  # [1, KEYS]
        else:
            q_ptr = row_pointers(b.q, sequence.batch, work.head_pack * B.heads, token)
            x_b = gathered_logits(q_ptr, w_ptr, values.live, k_b, b, ROWS, B)  # [1, KEYS]
        x_b = tl.where(allowed, x_b - values.m_b[:, None], NONE)
        tile_b = TileB(products_b, x_b, log2_probabilities(x_b, values.log2_l_b))

        if WANT.loss:
            s, acc = loss_terms(tile_a.p, tile_a.log2_p, tile_b.log2_q, GROUP)  # [DISTRIBUTIONS]
            sum_p += s
            sum_acc += acc
        if WANT.a:
            d = derivative_a(tile_a, tile_b, values, allowed, a, A)  # [ROWS, KEYS]
            dq_a = dot_add(d, gradient_columns(k_a, piece.first_a, A, True), dq_a, A.upcast)  # [ROWS, GRAD]
            dk = dot(tl.trans(d), q_columns_a, A.upcast) * factors.a  # [KEYS, GRAD]
            store_rows(out.dk_a + (dk_index_a + keys) * A.dim, exist, dk, piece.first_a, A, True)
        if WANT.b:
            d = derivative_b(tile_a, tile_b, values, allowed, b, B, GROUP)  # [DISTRIBUTIONS, KEYS]
            if not PAIRED:
                if B.weighted:
                    dw += weight_terms(d, head_x, allowed, True)
                d = tl.broadcast_to(d, [ROWS, KEYS])
                threshold = relu_threshold(values.m_b)
                d = head_derivative(d, head_x, w, threshold, factors.index_divisor, b.q.ptr.dtype.element_ty, B)
            dq_b = dot_add(d, gradient_columns(k_b, piece.first_b, B, True), dq_b, B.upcast)  # [ROWS, GRAD]
            dk = dot(tl.trans(d), q_columns_b, B.upcast) * factors.b  # [KEYS, GRAD]
            store_rows(out.dk_b + (dk_index_b + keys) * B.dim, exist, dk, piece.first_b, B, True)

    if WANT.loss:
        stored = rows.exist & piece.is_first & (PAIRED | (part == 0))
        tl.store(out.sum_p + rows.index, tl.where(values.live, sum_p, 0.0), mask=stored)
        tl.store(out.sum_acc + rows.index, tl.where(values.live, sum_acc, 0.0), mask=stored)
    if WANT.a:
        dq_a = tl.where(live_heads[:, None], dq_a * factors.a, 0.0)
        store_rows(out.dq_a + rows.index * A.dim, rows.exist, dq_a, piece.first_a, A, False)
    if WANT.b:
        dq_b = tl.where(live_heads[:, None], dq_b * factors.b, 0.0)
        store_rows(out.dq_b + heads.index * B.dim, heads.exist, dq_b, piece.first_b, B, False)
        if B.weighted:
            dw = rounded(tl.where(live_heads, dw * factors.w, 0.0), out.dw_b.dtype.element_ty, B.upcast)
            tl.store(out.dw_b + heads.index, dw, mask=heads.exist & piece.is_first)
