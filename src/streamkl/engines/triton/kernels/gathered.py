"""The passes over selected keys: a program owns one query and gathers its selected keys, tile by tile.

The rows of a tile are the query's heads that read the same key head and the same top-k head, so that a key is gathered
once for all of them. The heads of a head mean, or of an indexer, are reduced to one row, with the state of one row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.forward import store_mixture, store_paired
from streamkl.engines.triton.kernels.primitives import (
    IGNORED,
    NONE,
    checked_maximum,
    find_sequence,
    head_weights,
    load_tile,
    log2_probabilities,
    logits,
    mean_of,
    my_block,
    product,
    row_pointers,
    update_lse,
    update_mixture,
    update_paired,
    zeros,
)

COLUMNS = tl.constexpr(1024)
"""How many columns of the top-k indices are read at once, before any key is gathered."""


@triton.jit
def my_query(blocks, head_groups, parts, cu, extent, MASK: tl.constexpr):
    """The work of this program: ``(i, head_group, batch, part, q_start, q_len, k_start, k_len)``.

    It is one part of the heads of a query's head group. Queries that see the most keys come first. ``i`` is ``q_len``
    for a spare program of a packed batch.
    """
    block, head_group, batch, part = my_block(blocks, head_groups, parts)
    batch, q_start, q_len, k_start, k_len, i = find_sequence(blocks - 1 - block, batch, cu, extent, 0, 1, 1, MASK)
    return i, head_group, batch, part, q_start, q_len, k_start, k_len


@triton.jit
def own_rows(part, head_group, head_groups, batch, i, q_start, q_len, nq, PACK: tl.constexpr, ROWS: tl.constexpr):
    """A part of a head group's heads in the rows of a tile: ``(o_h, m_q, o_row)``, as in `packed_rows`."""
    o_m = part * ROWS + tl.arange(0, ROWS)
    o_h = head_group * PACK + o_m
    o_row = (batch.to(tl.int64) * (head_groups * PACK) + o_h) * nq + q_start + i
    return o_h, (o_m < PACK) & (i < q_len), o_row


@triton.jit
def selected_keys(p_topk, stride, o_c, columns, i0, i1, q_len, k_len, extent, MASK: tl.constexpr):
    """The selected keys in columns ``o_c``, counted from the first of the sequence, and which of them are seen.

    They are those of the queries ``[i0, i1)``.
    """
    b_j = tl.load(p_topk + o_c.to(tl.int64) * stride, mask=o_c < columns, other=-1)
    m_j = (b_j >= 0) & (b_j < k_len)
    if MASK.right:
        m_j &= b_j < i1 + (k_len - q_len) + extent[3]
    if MASK.left:
        m_j &= b_j >= i0 + (k_len - q_len) - extent[2]
    return tl.where(m_j, b_j, 0).to(tl.int64), m_j


@triton.jit
def seen_columns(p_topk, stride, columns, i0, i1, q_len, k_len, extent, MASK: tl.constexpr):
    """The number of columns up to the last one with a key that a query of ``[i0, i1)`` sees; 0 if there is none."""
    seen = i0 * 0
    for c0 in range(0, tl.where(i0 < q_len, columns, 0), COLUMNS):
        o_c = c0 + tl.arange(0, COLUMNS)
        _, m_j = selected_keys(p_topk, stride, o_c, columns, i0, i1, q_len, k_len, extent, MASK)
        seen = tl.maximum(seen, tl.max(tl.where(m_j, o_c + 1, 0), 0))
    return seen


@triton.jit
def held(p_n, m_n, stride_d, SIDE: tl.constexpr):
    """The tokens at ``p_n``, ``[tokens, block]``; 0 where heads are so wide that `product` reads chunks."""
    if SIDE.chunked:
        return 0
    else:
        return load_tile(p_n, m_n, stride_d, 0, SIDE.dim, SIDE.block, True)


@triton.jit
def row_sum(b_x, m_h, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """The sum over the heads in the rows of a tile, ``[1, keys]``; a row without a head adds 0."""
    if HEADS % ROWS != 0:
        b_x = tl.where(m_h[:, None], b_x, 0.0)
    return tl.sum(b_x, 0)[None, :]


@triton.jit
def weighted_sum(b_y, w, m_h, ROWS: tl.constexpr, SIDE: tl.constexpr):
    """The sum of the logits of the heads, each times its weight."""
    if SIDE.weighted:
        b_y = b_y * w[:, None]
    return row_sum(b_y, m_h, SIDE.heads, ROWS)


@triton.jit
def gathered_target(
    p_q, p_m, p_l, exists, stride_qh, stride_qd, nq, dim, p_k, m_k, stride_kh, stride_kd, first_head, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SIDE: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The sum of the probabilities of a head group, ``[1, keys]``: `target` for one query.

    Pointers are those of the first head of the group; each key head is gathered once for all heads that read it.
    """
    b_p = zeros(1, KEYS)
    for n in range(GROUP.kv):
        kv = (first_head + n * GROUP.each) // SIDE.per_kv
        p_kv = p_k + kv.to(tl.int64) * stride_kh
        b_k = held(p_kv, m_k, stride_kd, SIDE)
        for h0 in range(0, GROUP.each, ROWS):
            o_m = h0 + tl.arange(0, ROWS)
            m_h = (o_m < GROUP.each) & exists
            o_h = (n * GROUP.each + o_m).to(tl.int64)
            p_h = p_q + o_h * stride_qh
            b_q = held(p_h, m_h, stride_qd, SIDE)
            b_s = product(b_q, b_k, p_h, m_h, stride_qd, p_kv, m_k, stride_kd, dim, ROWS, KEYS, SIDE, True)
            m = tl.load(p_m + o_h * nq, mask=m_h, other=0.0)
            l = tl.load(p_l + o_h * nq, mask=m_h, other=IGNORED)
            b_x = tl.exp2(log2_probabilities(logits(b_s, scale, SIDE) - m[:, None], l))
            b_p += row_sum(b_x, m_h, GROUP.each, ROWS)
    return tl.where(m_k[None, :], b_p, 0.0)


@triton.jit
def gathered_logits(
    p_q, exists, stride_qh, stride_qd, p_w, stride_wh, b_k, p_k, m_k, stride_kd, dim, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    """The logits of a head-summed side, ``[1, keys]``: `head_summed_logits` for one query."""
    b_x = zeros(1, KEYS)
    for h0 in range(0, SIDE.heads, ROWS):
        o_m = h0 + tl.arange(0, ROWS)
        m_h = (o_m < SIDE.heads) & exists
        p_h = p_q + o_m.to(tl.int64) * stride_qh
        b_q = held(p_h, m_h, stride_qd, SIDE)
        b_s = product(b_q, b_k, p_h, m_h, stride_qd, p_k, m_k, stride_kd, dim, ROWS, KEYS, SIDE, True)
        w = 0
        if SIDE.weighted:
            w = head_weights(p_w + o_m.to(tl.int64) * stride_wh, m_h)
        b_x += weighted_sum(logits(b_s, scale, SIDE), w, m_h, ROWS, SIDE)
    return b_x


@triton.jit
def gathered_lse_kernel(
    q, k, w, strides_q, strides_k, strides_w, topk, strides_t, columns, per_topk_head, cu, extent, scale, out_m,
    out_ln_l, blocks, head_groups, parts,
    SIDE: tl.constexpr, GROUP: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """``(m, ln l) [B, H, Nq]`` of one side over the selected keys ``topk [B, topk_heads, Nq, columns]``.

    ``per_topk_head`` heads read one top-k head; a program has one of ``parts`` of a head group.
    """
    STATES: tl.constexpr = 1 if SIDE.heads > 0 else ROWS
    i, head_group, batch, part, q_start, q_len, k_start, k_len = my_query(blocks, head_groups, parts, cu, extent, MASK)
    o_h, m_q, o_row = own_rows(part, head_group, head_groups, batch, i, q_start, q_len, extent[0], GROUP.pack, STATES)
    p_topk = row_pointers(topk, strides_t, batch, head_group * GROUP.pack // per_topk_head, q_start + i)
    seen = seen_columns(p_topk, strides_t[3], columns, i, i + 1, q_len, k_len, extent, MASK)
    p_k = row_pointers(k, strides_k, batch, head_group * GROUP.pack // SIDE.per_kv, k_start)
    p_q = row_pointers(q, strides_q, batch, o_h, q_start + i)
    b_q, p_w, stride_wh = 0, 0, 0
    if SIDE.weighted:
        p_w = row_pointers(w, strides_w, batch, o_h, q_start + i)
        stride_wh = strides_w[1]
    if SIDE.heads == 0:
        b_q = held(p_q, m_q, strides_q[3], SIDE)
    m = tl.full([STATES], NONE, tl.float32)
    l = tl.zeros([STATES], tl.float32)
    for c0 in range(0, seen, KEYS):
        o_c = c0 + tl.arange(0, KEYS)
        o_j, m_j = selected_keys(p_topk, strides_t[3], o_c, columns, i, i + 1, q_len, k_len, extent, MASK)
        p_j = p_k + o_j * strides_k[2]
        b_k = held(p_j, m_j, strides_k[3], SIDE)
        if SIDE.heads > 0:
            b_x = gathered_logits(
                p_q, m_q, strides_q[1], strides_q[3], p_w, stride_wh, b_k, p_j, m_j, strides_k[3], extent[4], scale,
                ROWS, KEYS, SIDE,
            )  # fmt: skip
        else:
            b_s = product(
                b_q, b_k, p_q, m_q, strides_q[3], p_j, m_j, strides_k[3], extent[4], ROWS, KEYS, SIDE, True
            )  # fmt: skip
            b_x = logits(b_s, scale, SIDE)
        m, l = update_lse(m, l, tl.where(m_j[None, :], b_x, NONE))
    m_live = m_q & (seen > 0)
    m = checked_maximum(m, m_live)
    tl.store(out_m + o_row, tl.where(m_live, m, -float("inf")), mask=m_q)
    tl.store(out_ln_l + o_row, tl.where(m_live, tl.log(l), 0.0), mask=m_q)


@triton.jit
def gathered_paired_kernel(
    q_a, k_a, q_b, k_b, strides_qa, strides_ka, strides_qb, strides_kb, topk, strides_t, columns, per_topk_head, cu,
    extent, scale_a, scale_b, out_kl, out_mean, out_ma, out_la, out_mb, out_lb, blocks, head_groups, parts,
    A: tl.constexpr, B: tl.constexpr, GROUP: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The divergence head by head, its mean and its row stats over selected keys: `PairedState` in registers."""
    i, head_group, batch, part, q_start, q_len, k_start, k_len = my_query(blocks, head_groups, parts, cu, extent, MASK)
    o_h, m_q, o_row = own_rows(part, head_group, head_groups, batch, i, q_start, q_len, extent[0], GROUP.pack, ROWS)
    p_topk = row_pointers(topk, strides_t, batch, head_group * GROUP.pack // per_topk_head, q_start + i)
    seen = seen_columns(p_topk, strides_t[3], columns, i, i + 1, q_len, k_len, extent, MASK)
    p_ka = row_pointers(k_a, strides_ka, batch, head_group * GROUP.pack // A.per_kv, k_start)
    p_kb = row_pointers(k_b, strides_kb, batch, head_group * GROUP.pack // B.per_kv, k_start)
    p_qa = row_pointers(q_a, strides_qa, batch, o_h, q_start + i)
    p_qb = row_pointers(q_b, strides_qb, batch, o_h, q_start + i)
    b_qa = held(p_qa, m_q, strides_qa[3], A)
    b_qb = held(p_qb, m_q, strides_qb[3], B)
    m_a = tl.full([ROWS], NONE, tl.float32)
    m_b = tl.full([ROWS], NONE, tl.float32)
    l_a = tl.zeros([ROWS], tl.float32)
    l_b = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS], tl.float32)
    for c0 in range(0, seen, KEYS):
        o_c = c0 + tl.arange(0, KEYS)
        o_j, m_j = selected_keys(p_topk, strides_t[3], o_c, columns, i, i + 1, q_len, k_len, extent, MASK)
        p_ja, p_jb = p_ka + o_j * strides_ka[2], p_kb + o_j * strides_kb[2]
        b_ka, b_kb = held(p_ja, m_j, strides_ka[3], A), held(p_jb, m_j, strides_kb[3], B)
        b_a = product(b_qa, b_ka, p_qa, m_q, strides_qa[3], p_ja, m_j, strides_ka[3], extent[4], ROWS, KEYS, A, True)
        b_b = product(b_qb, b_kb, p_qb, m_q, strides_qb[3], p_jb, m_j, strides_kb[3], extent[5], ROWS, KEYS, B, True)
        b_a = tl.where(m_j[None, :], logits(b_a, scale_a, A), NONE)
        b_b = tl.where(m_j[None, :], logits(b_b, scale_b, B), NONE)
        m_a, l_a, m_b, l_b, acc = update_paired(m_a, l_a, m_b, l_b, acc, b_a, b_b)
    m_live = m_q & (seen > 0)
    m_a = checked_maximum(m_a, m_live)
    m_b = checked_maximum(m_b, m_live)
    store_paired(out_kl, out_mean, out_ma, out_la, out_mb, out_lb, o_row, m_q, m_live, m_a, l_a, m_b, l_b, acc)


@triton.jit
def gathered_mixture_kernel(
    q_a, k_a, q_b, k_b, w_b, strides_qa, strides_ka, strides_qb, strides_kb, strides_wb, m_a, l_a, topk, strides_t,
    columns, per_topk_head, cu, extent, scale_a, scale_b, out_kl, out_mb, out_lb, out_s, blocks, head_groups, parts,
    A: tl.constexpr, B: tl.constexpr, GROUP: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr,
    TARGET_ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The divergence from a head mean over selected keys, with ``m_a, log2 l_a [B, H, Nq]`` known.

    The distribution of a program has ``B.heads`` heads: one, or those of an indexer.
    """
    i, head_group, batch, part, q_start, q_len, k_start, k_len = my_query(blocks, head_groups, parts, cu, extent, MASK)
    _, m_q, o_row = own_rows(part, head_group, head_groups, batch, i, q_start, q_len, extent[0], 1, 1)
    p_topk = row_pointers(topk, strides_t, batch, head_group // per_topk_head, q_start + i)
    seen = seen_columns(p_topk, strides_t[3], columns, i, i + 1, q_len, k_len, extent, MASK)
    first_head = head_group * GROUP.size
    o_row_a = (batch.to(tl.int64) * head_groups + head_group) * GROUP.size * extent[0] + q_start + i
    p_qa = row_pointers(q_a, strides_qa, batch, first_head, q_start + i)
    p_qb = row_pointers(q_b, strides_qb, batch, head_group * B.heads, q_start + i)
    p_ka = row_pointers(k_a, strides_ka, batch, head_group * 0, k_start)
    p_kb = row_pointers(k_b, strides_kb, batch, head_group // B.per_kv, k_start)
    p_wb, stride_wh = 0, 0
    if B.weighted:
        p_wb = row_pointers(w_b, strides_wb, batch, head_group * B.heads, q_start + i)
        stride_wh = strides_wb[1]
    m_b = tl.full([1], NONE, tl.float32)
    l_b = tl.zeros([1], tl.float32)
    s = tl.zeros([1], tl.float32)
    acc = tl.zeros([1], tl.float32)
    for c0 in range(0, seen, KEYS):
        o_c = c0 + tl.arange(0, KEYS)
        o_j, m_j = selected_keys(p_topk, strides_t[3], o_c, columns, i, i + 1, q_len, k_len, extent, MASK)
        b_p = gathered_target(
            p_qa, m_a + o_row_a, l_a + o_row_a, i < q_len, strides_qa[1], strides_qa[3], extent[0], extent[4],
            p_ka + o_j * strides_ka[2], m_j, strides_ka[1], strides_ka[3], first_head, scale_a, TARGET_ROWS, KEYS, A,
            GROUP,
        )  # fmt: skip
        p_j = p_kb + o_j * strides_kb[2]
        b_b = gathered_logits(
            p_qb, i < q_len, strides_qb[1], strides_qb[3], p_wb, stride_wh, held(p_j, m_j, strides_kb[3], B), p_j, m_j,
            strides_kb[3], extent[5], scale_b, ROWS, KEYS, B,
        )  # fmt: skip
        m_b, l_b, s, acc = update_mixture(
            m_b, l_b, s, acc, mean_of(b_p, GROUP), tl.where(m_j[None, :], b_b, NONE)
        )  # fmt: skip
    m_live = m_q & (seen > 0)
    m_b = checked_maximum(m_b, m_live)
    store_mixture(out_kl, out_mb, out_lb, out_s, o_row, m_q, m_live, m_b, l_b, s, acc)
