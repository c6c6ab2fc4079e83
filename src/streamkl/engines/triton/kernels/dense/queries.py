"""The backward pass that owns a block of rows: dQ of the deterministic pair, with `keys_kernel` for dK.

Results do not depend on the order of programs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.groups import (
    Piece,
    QueryBlock,
    QueryGradients,
    RowStatPtrs,
    Tokens,
)
from streamkl.engines.triton.kernels.tile.gradient import (
    BOOST_A,
    BOOST_B,
    derivative_a,
    derivative_b,
    gradient_factor,
    head_derivative,
    index_weight_divisor,
    load_rows,
    loss_terms,
    relu_threshold,
    store_rows,
    tile_of_a,
    tile_of_b,
    weight_terms,
)
from streamkl.engines.triton.kernels.tile.products import (
    activated,
    dot_add,
    finite,
    gradient_columns,
    head_weights,
    held,
    product,
    rounded,
    unheld,
    weight_pointers,
    zeros,
)
from streamkl.engines.triton.kernels.tile.tiles import (
    allowed_pairs,
    group_index,
    key_tiles,
    my_rows,
    my_work,
    nth_tile,
    row_pointers,
    tile_count,
)


@triton.jit
def _key_columns(k, first, SIDE: tl.constexpr, MASKED: tl.constexpr):
    """The columns of a tile of keys for dQ, ``[KEYS, GRAD]``; held ones are finite, those read here are made so."""
    columns = gradient_columns(k, first, SIDE, MASKED)
    if SIDE.chunked and MASKED:
        columns = finite(columns)
    return columns


@triton.jit
def _held_keys(ptrs, exist, x, SIDE: tl.constexpr, WANTED: tl.constexpr, MASKED: tl.constexpr):
    """A tile of keys, 0 where they are not finite if a gradient is wanted and pairs of them may not be allowed."""
    k = held(ptrs, exist, x, SIDE, MASKED)  # [KEYS, BLOCK]
    if SIDE.chunked:
        return k
    elif MASKED and WANTED:
        return Tokens(k.ptrs, k.exist, k.stride_dim, finite(k.tile))
    else:
        return k


@triton.jit
def _query_pass(
    gradients,
    block,
    values,
    sequence,
    tiles,
    a,
    b,
    support,
    index_divisor,
    piece,
    A: tl.constexpr,
    B: tl.constexpr,
    GROUP: tl.constexpr,
    MASK: tl.constexpr,
    KEYS: tl.constexpr,
    WANT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds the contribution of the full tiles of keys, or of the masked ones, to dQ; for an indexer, of one head."""
    dq_a = gradients.dq_a
    dq_b = gradients.dq_b
    dw = gradients.dw
    sum_p = gradients.sum_p
    sum_acc = gradients.sum_acc
    count = tile_count(tiles, MASKED)
    for n in range(count):
        keys = nth_tile(n, tiles, MASKED) * KEYS + tl.arange(0, KEYS)  # [KEYS]
        exist = keys < sequence.k_len
        allowed = exist[None, :]
        if MASKED:
            allowed = allowed_pairs(block.queries, keys, sequence, support, MASK)  # [ROWS, KEYS]
        k_ptrs_a = block.k_ptrs_a + keys.to(tl.int64) * a.k.stride_token
        if GROUP.size == 1:
            k_a = _held_keys(k_ptrs_a, exist, a.k, A, WANT.a, MASKED)
        else:
            k_a = unheld(k_ptrs_a, exist, a.k)
        tile_a = tile_of_a(
            block.q_a, k_a, block.stats_a, values, allowed, block.first_head, support.nq, a, A, GROUP, MASKED, MASKED
        )
        k_ptrs_b = block.k_ptrs_b + keys.to(tl.int64) * b.k.stride_token
        k_b = _held_keys(k_ptrs_b, exist, b.k, B, WANT.b, MASKED)
        tile_b = tile_of_b(block.q_b, block.w_ptrs, k_b, values, allowed, b, B, MASKED, MASKED)

        if WANT.loss:
            s, acc = loss_terms(tile_a.p, tile_a.log2_p, tile_b.log2_q, GROUP)  # [ROWS]
            sum_p += s
            sum_acc += acc
        if WANT.a:
            d = derivative_a(tile_a, tile_b, values, allowed, a, A)  # [ROWS, KEYS]
            dq_a = dot_add(d, _key_columns(k_a, piece.first_a, A, MASKED), dq_a, A.upcast)  # [ROWS, GRAD]
        if WANT.b:
            d = derivative_b(tile_a, tile_b, values, allowed, b, B, GROUP)  # [ROWS, KEYS]
            if B.heads > 0:
                products = product(block.q_head, k_b, b.dim, B, MASKED)  # [ROWS, KEYS]
                head_x = activated(products, b.scale, B)
                if B.weighted:
                    dw += weight_terms(d, head_x, allowed, MASKED)
                d = head_derivative(
                    d,
                    head_x,
                    block.w_head,
                    relu_threshold(values.m_b),
                    index_divisor,
                    block.q_head.ptrs.dtype.element_ty,
                    B,
                )
            dq_b = dot_add(d, _key_columns(k_b, piece.first_b, B, MASKED), dq_b, B.upcast)  # [ROWS, GRAD]
    return QueryGradients(dq_a, dq_b, dw, sum_p, sum_acc)


@triton.jit
def queries_kernel(
    a,
    b,
    stats,
    support,
    out,
    counts,
    A: tl.constexpr,
    B: tl.constexpr,
    GROUP: tl.constexpr,
    MASK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WANT: tl.constexpr,
):
    """DQ of a block of packed rows: one of the pieces of its columns, from one of the splits of the keys.

    ``dq`` is ``[splits, B, heads, Nq, D]``, the sums of a loss are ``[splits, B, R, Nq]``. Each head of an indexer has
    a program of its own, which computes dW of its head as well.
    """
    HEADS: tl.constexpr = max(B.heads, 1)
    dtype_a: tl.constexpr = a.q.ptr.dtype.element_ty
    dtype_b: tl.constexpr = b.q.ptr.dtype.element_ty
    work = my_work(counts.blocks, counts.head_packs, counts.pieces * HEADS * counts.splits)
    part = work.part % counts.pieces
    head = work.part // counts.pieces % HEADS
    split = work.part // counts.pieces // HEADS
    sequence, row_block, rows = my_rows(work, support, counts, GROUP.pack, ROWS, MASK)
    tokens = sequence.q_start + rows.queries  # [ROWS]
    index_a = group_index(rows, sequence, support.nq, counts.head_packs, GROUP)
    values = load_rows(stats, rows, WANT, GROUP.size == 1, True)
    q_ptrs_a = row_pointers(a.q, sequence.batch, rows.heads * GROUP.size, tokens)
    q_ptrs_b = row_pointers(b.q, sequence.batch, rows.heads, tokens)
    kv_a = work.head_pack * GROUP.pack // A.per_kv
    if GROUP.size > 1:
        kv_a = work.head_pack * 0  # `target` walks the key heads itself
    k_ptrs_a = row_pointers(a.k, sequence.batch, kv_a, sequence.k_start)
    k_ptrs_b = row_pointers(b.k, sequence.batch, work.head_pack * GROUP.pack // B.per_kv, sequence.k_start)
    if GROUP.size > 1:
        q_a = unheld(q_ptrs_a, values.live, a.q)
    else:
        q_a = held(q_ptrs_a, values.live, a.q, A, True)  # [ROWS, BLOCK]
    q_head = held(q_ptrs_b + head.to(tl.int64) * b.q.stride_head, values.live, b.q, B, True)  # [ROWS, BLOCK]
    if B.heads > 0:
        q_b = unheld(q_ptrs_b, values.live, b.q)
    else:
        q_b = q_head
    w_ptrs = weight_pointers(b, sequence.batch, rows.heads, tokens, B)
    w_head, dw = values.weight, 0.0
    if B.weighted:
        w_head = head_weights(w_ptrs + head.to(tl.int64) * b.w.stride_head, values.live)  # [ROWS]
        dw = tl.zeros([ROWS], tl.float32)
    index_divisor = index_weight_divisor(stats.index_divisor, dtype_b, B)
    piece = Piece(part * A.grad, part * B.grad, part == 0)
    dq_a, dq_b = 0.0, 0.0
    if WANT.a:
        dq_a = zeros(ROWS, A.grad)
    if WANT.b:
        dq_b = zeros(ROWS, B.grad)
    zero = tl.zeros([ROWS], tl.float32)
    block = QueryBlock(
        rows.queries,
        q_a,
        q_b,
        q_head,
        w_ptrs,
        w_head,
        k_ptrs_a,
        k_ptrs_b,
        RowStatPtrs(stats.a.m + index_a, stats.a.log2_l + index_a),
        work.head_pack * GROUP.pack * GROUP.size,
    )
    tiles = key_tiles(row_block, sequence, support, split, counts.splits, GROUP.pack, ROWS, KEYS, MASK)
    gradients = QueryGradients(dq_a, dq_b, dw, zero, zero)
    for masked in tl.static_range(2):
        gradients = _query_pass(
            gradients,
            block,
            values,
            sequence,
            tiles,
            a,
            b,
            support,
            index_divisor,
            piece,
            A,
            B,
            GROUP,
            MASK,
            KEYS,
            WANT,
            masked,
        )
    index = split.to(tl.int64) * counts.rows + rows.index
    if WANT.loss:
        stored = rows.exist & piece.is_first & (head == 0)
        tl.store(out.sum_p + index, tl.where(values.live, gradients.sum_p, 0.0), mask=stored)
        tl.store(out.sum_acc + index, tl.where(values.live, gradients.sum_acc, 0.0), mask=stored)
    if WANT.a:
        factor = gradient_factor(a.scale, stats.weight_divisor, dtype_a, BOOST_A, WANT.half)
        dq_a = tl.where(values.live[:, None], gradients.dq_a * factor, 0.0)
        store_rows(out.dq_a + index * A.dim, rows.exist, dq_a, piece.first_a, A, False)
    if B.heads > 0:
        index = (split.to(tl.int64) * counts.rows + sequence.batch.to(tl.int64) * support.nq) * B.heads
        index += (head.to(tl.int64) * support.nq + sequence.q_start) + rows.queries
        if B.weighted:
            factor = gradient_factor(1.0, stats.weight_divisor, tl.float32, BOOST_B, WANT.half)
            dw = tl.where(values.live, gradients.dw * factor, 0.0)
            dw = rounded(dw, out.dw_b.dtype.element_ty, B.upcast)
            tl.store(out.dw_b + index, dw, mask=rows.exist & piece.is_first)
    if WANT.b:
        factor = gradient_factor(b.scale, stats.weight_divisor, dtype_b, BOOST_B, WANT.half) * index_divisor
        dq_b = tl.where(values.live[:, None], gradients.dq_b * factor, 0.0)
        store_rows(out.dq_b + index * B.dim, rows.exist, dq_b, piece.first_b, B, False)
