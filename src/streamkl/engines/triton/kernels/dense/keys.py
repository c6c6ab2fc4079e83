"""The backward pass that owns a block of keys.

dK stays in registers during the walk over the rows, and dQ is accumulated in float32 by atomic additions, so each tile
is computed once. Without these additions it is one half of the deterministic pair, of which ``queries.py`` has the
other. Either also sums the rows' losses for `train`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.groups import (
    KeyBlock,
    KeyGradients,
    Piece,
    RowStatPtrs,
)
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
    tile_of_b,
    weight_terms,
)
from streamkl.engines.triton.kernels.tile.products import (
    activated,
    dot,
    dot_add,
    finite,
    gradient_columns,
    head_weights,
    held,
    load_tile,
    product,
    unheld,
    weight_pointers,
    zeros,
)
from streamkl.engines.triton.kernels.tile.tiles import (
    allowed_pairs,
    find_sequence,
    group_index,
    my_work,
    nth_tile,
    packed_rows,
    row_pointers,
    row_tiles,
    tile_count,
)


@triton.jit
def _finite_columns(k, first, SIDE: tl.constexpr):
    """The columns of the keys that dQ needs, in pieces of at most ``[KEYS, 32]``; 0 where they are not finite."""
    WIDTH: tl.constexpr = min(SIDE.grad, 32)
    pieces = ()
    for n in tl.static_range(SIDE.grad // WIDTH):
        pieces = pieces + (finite(load_tile(k, first + n * WIDTH, SIDE.dim, WIDTH, True, SIDE.grad)),)
    return pieces


@triton.jit
def _add_rows(dq_ptrs, live, d, columns, factor, first, SIDE: tl.constexpr):
    """Adds a tile's contribution to dQ, ``[ROWS, GRAD]``, in float32, one piece of the columns at a time."""
    WIDTH: tl.constexpr = min(SIDE.grad, 32)
    for n in tl.static_range(SIDE.grad // WIDTH):
        dq = dot(d, columns[n], SIDE.upcast) * factor  # [ROWS, WIDTH]
        at = first + n * WIDTH + tl.arange(0, WIDTH)
        mask = live[:, None] & (at < SIDE.dim)[None, :]
        tl.atomic_add(dq_ptrs[:, None] + at[None, :], dq, mask=mask, sem="relaxed")


@triton.jit
def _add_index_heads(
    dk,
    d,
    q,
    w_ptrs,
    k,
    columns,
    values,
    allowed,
    index,
    nq,
    side,
    out,
    factors,
    piece,
    SIDE: tl.constexpr,
    WANT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds the contribution of an indexer's heads to dK, and, if wanted, to dQ and dW; ``d`` is that of their sum.

    ``q``, ``w_ptrs`` and ``index`` are those of the first head. The scores of each head are recomputed: no tile has
    room for all of them.
    """
    threshold = relu_threshold(values.m_b)  # [ROWS]
    q_ptrs = q.ptrs
    dq_ptrs, dw_ptrs = 0, 0
    if WANT.dq:
        dq_ptrs = out.dq_b + index * SIDE.dim
        if SIDE.weighted:
            dw_ptrs = out.dw_b + index
    for _ in range(SIDE.heads):
        q_head = held(q_ptrs, q.exist, side.q, SIDE, True)  # [ROWS, BLOCK]
        head_x = activated(product(q_head, k, side.dim, SIDE, True), side.scale, SIDE)  # [ROWS, KEYS]
        w = 0
        if SIDE.weighted:
            w = head_weights(w_ptrs, q.exist)  # [ROWS]
            w_ptrs += side.w.stride_head
            if WANT.dq:
                dw = weight_terms(d, head_x, allowed, MASKED) * factors.w  # [ROWS]
                tl.atomic_add(dw_ptrs, dw, mask=values.live & piece.is_first, sem="relaxed")
                dw_ptrs += nq
        head_d = head_derivative(d, head_x, w, threshold, factors.index_divisor, q_ptrs.dtype.element_ty, SIDE)
        q_columns = gradient_columns(q_head, piece.first_b, SIDE, True)  # [ROWS, GRAD]
        dk = dot_add(tl.trans(head_d), q_columns, dk, SIDE.upcast)  # [KEYS, GRAD]
        if WANT.dq:
            _add_rows(dq_ptrs, values.live, head_d, columns, factors.b, piece.first_b, SIDE)
            dq_ptrs += tl.cast(nq, tl.int64) * SIDE.dim
        q_ptrs += side.q.stride_head
    return dk


@triton.jit
def _key_pass(
    gradients,
    block,
    head_pack,
    head_packs,
    sequence,
    tiles,
    a,
    b,
    stats,
    support,
    out,
    factors,
    piece,
    A: tl.constexpr,
    B: tl.constexpr,
    GROUP: tl.constexpr,
    MASK: tl.constexpr,
    ROWS: tl.constexpr,
    WANT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds the contribution of the full tiles of rows, or of the masked ones, to dK."""
    dk_a = gradients.dk_a
    dk_b = gradients.dk_b
    count = tile_count(tiles, MASKED)
    for n in range(count):
        t = nth_tile(n, tiles, MASKED)
        rows = packed_rows(t, head_pack, sequence, support.nq, head_packs, GROUP.pack, ROWS)
        tokens = sequence.q_start + rows.queries  # [ROWS]
        allowed = rows.exist[:, None]
        if MASKED:
            allowed = allowed_pairs(rows.queries, block.keys, sequence, support, MASK)  # [ROWS, KEYS]
        values = load_rows(stats, rows, WANT, GROUP.size == 1, MASKED)

        q_ptrs_a = row_pointers(a.q, sequence.batch, rows.heads * GROUP.size, tokens)
        if GROUP.size == 1:
            q_a = held(q_ptrs_a, finite_rows(values.live, values.m_a, WANT.a), a.q, A, True)  # [ROWS, BLOCK]
        else:
            q_a = unheld(q_ptrs_a, values.live, a.q)
        index_a = group_index(rows, sequence, support.nq, head_packs, GROUP)
        tile_a = tile_of_a(
            q_a,
            block.k_a,
            RowStatPtrs(stats.a.m + index_a, stats.a.log2_l + index_a),
            values,
            allowed,
            head_pack * GROUP.pack * GROUP.size,
            support.nq,
            a,
            A,
            GROUP,
            True,
            MASKED,
        )

        q_ptrs_b = row_pointers(b.q, sequence.batch, rows.heads, tokens)
        w_ptrs = weight_pointers(b, sequence.batch, rows.heads, tokens, B)
        read_b = finite_rows(values.live, values.m_b, WANT.b)
        if B.heads > 0:
            q_b = unheld(q_ptrs_b, read_b, b.q)
        else:
            q_b = held(q_ptrs_b, read_b, b.q, B, True)  # [ROWS, BLOCK]
        tile_b = tile_of_b(q_b, w_ptrs, block.k_b, values, allowed, b, B, True, MASKED)

        if WANT.loss:
            s, acc = loss_terms(tile_a.p, tile_a.log2_p, tile_b.log2_q, GROUP)  # [ROWS]
            tl.atomic_add(out.sum_p + rows.index, s, mask=values.live & piece.is_first, sem="relaxed")
            tl.atomic_add(out.sum_acc + rows.index, acc, mask=values.live & piece.is_first, sem="relaxed")
        if WANT.a:
            d = derivative_a(tile_a, tile_b, values, allowed, a, A)  # [ROWS, KEYS]
            q_columns = gradient_columns(q_a, piece.first_a, A, True)  # [ROWS, GRAD]
            dk_a = dot_add(tl.trans(d), q_columns, dk_a, A.upcast)  # [KEYS, GRAD]
            if WANT.dq:
                dq_ptrs = out.dq_a + rows.index * A.dim
                _add_rows(dq_ptrs, values.live, d, block.columns_a, factors.a, piece.first_a, A)
        if B.heads > 0:
            d = derivative_b(tile_a, tile_b, values, allowed, b, B, GROUP)  # [ROWS, KEYS]
            index = (sequence.batch.to(tl.int64) * B.heads + rows.heads) * support.nq + tokens
            dk_b = _add_index_heads(
                dk_b,
                d,
                q_b,
                w_ptrs,
                block.k_b,
                block.columns_b,
                values,
                allowed,
                index,
                support.nq,
                b,
                out,
                factors,
                piece,
                B,
                WANT,
                MASKED,
            )
        elif WANT.b:
            d = derivative_b(tile_a, tile_b, values, allowed, b, B, GROUP)  # [ROWS, KEYS]
            q_columns = gradient_columns(q_b, piece.first_b, B, True)  # [ROWS, GRAD]
            dk_b = dot_add(tl.trans(d), q_columns, dk_b, B.upcast)  # [KEYS, GRAD]
            if WANT.dq:
                dq_ptrs = out.dq_b + rows.index * B.dim
                _add_rows(dq_ptrs, values.live, d, block.columns_b, factors.b, piece.first_b, B)
    return KeyGradients(dk_a, dk_b)


@triton.jit
def keys_kernel(
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
    """DK of a block of keys over the head packs that read it, and with ``WANT.dq`` their part of dQ.

    It computes one of the pieces of a wide gradient's columns, from one of the splits of the rows.
    """
    work = my_work(counts.blocks, counts.owners, counts.pieces * counts.splits)
    part = work.part % counts.pieces
    split = work.part // counts.pieces
    sequence, key_block = find_sequence(work.block, work.batch, support, 1, KEYS, MASK, True)
    head_packs = counts.owners * counts.span
    keys = key_block * KEYS + tl.arange(0, KEYS)
    exist = keys < sequence.k_len
    tokens = sequence.k_start + keys  # [KEYS]
    piece = Piece(part * A.grad, part * B.grad, part == 0)
    factors = gradient_factors(a, b, stats, B, WANT)
    tiles = row_tiles(key_block, sequence, support, split, counts.splits, GROUP.pack, ROWS, KEYS, MASK)
    dk_a, dk_b = 0.0, 0.0
    if WANT.a:
        dk_a = zeros(KEYS, A.grad)
    if WANT.b:
        dk_b = zeros(KEYS, B.grad)
    for n in range(counts.span):
        head_pack = work.head_pack * counts.span + n
        kv_a = head_pack * GROUP.pack // A.per_kv
        if GROUP.size > 1:
            kv_a = head_pack * 0  # `target` walks the key heads itself
        k_ptrs_a = row_pointers(a.k, sequence.batch, kv_a, tokens)
        k_ptrs_b = row_pointers(b.k, sequence.batch, head_pack * GROUP.pack // B.per_kv, tokens)
        if GROUP.size > 1:
            k_a = unheld(k_ptrs_a, exist, a.k)
        else:
            k_a = held(k_ptrs_a, exist, a.k, A, True)  # [KEYS, BLOCK]
        k_b = held(k_ptrs_b, exist, b.k, B, True)  # [KEYS, BLOCK]
        columns_a, columns_b = 0, 0
        if WANT.a and WANT.dq:
            columns_a = _finite_columns(k_a, piece.first_a, A)
        if WANT.b and WANT.dq:
            columns_b = _finite_columns(k_b, piece.first_b, B)
        block = KeyBlock(keys, k_a, k_b, columns_a, columns_b)
        for masked in tl.static_range(2):
            gradients = _key_pass(
                KeyGradients(dk_a, dk_b),
                block,
                head_pack,
                head_packs,
                sequence,
                tiles,
                a,
                b,
                stats,
                support,
                out,
                factors,
                piece,
                A,
                B,
                GROUP,
                MASK,
                ROWS,
                WANT,
                masked,
            )
            dk_a, dk_b = gradients.dk_a, gradients.dk_b
    first_head = work.head_pack * counts.span * GROUP.pack
    heads = head_packs * GROUP.pack
    if WANT.a:
        kv = sequence.batch.to(tl.int64) * (heads // A.per_kv) + first_head // A.per_kv
        index = kv * support.nk + tokens  # [KEYS]
        store_rows(out.dk_a + index * A.dim, exist, dk_a * factors.a, piece.first_a, A, WANT.atomic_a)
    if WANT.b:
        kv = sequence.batch.to(tl.int64) * (heads // B.per_kv) + first_head // B.per_kv
        index = kv * support.nk + tokens  # [KEYS]
        store_rows(out.dk_b + index * B.dim, exist, dk_b * factors.b, piece.first_b, B, WANT.atomic_b)
