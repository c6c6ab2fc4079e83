"""The backward pass over selected keys.

A program owns one query and a part of its heads: their dQ and dW stay in registers during the walk over its selected
keys. Any query may select a key, so dK is accumulated in float32, in no fixed order. The pass also sums the losses of
`train`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.gathered import (
    gathered_logits,
    gathered_target,
    held,
    my_query,
    own_rows,
    seen_columns,
    selected_keys,
    weighted_sum,
)
from streamkl.engines.triton.kernels.gradient import (
    BOOST_A,
    BOOST_B,
    derivative,
    head_derivative,
    index_peak,
    loss_terms,
    shifted,
    store_rows,
    unboosted,
    weight_terms,
)
from streamkl.engines.triton.kernels.primitives import (
    IGNORED,
    NONE,
    SMALLEST,
    dot,
    dot_add,
    head_weights,
    load_tile,
    log2_probabilities,
    logits,
    product,
    row_pointers,
    zeros,
)


@triton.jit
def _columns(b_x, p_n, m_n, stride_d, g0, SIDE: tl.constexpr):
    """The columns of a tile for a gradient: all of them, if they are held, or a piece that is read for it."""
    if SIDE.chunked:
        return load_tile(p_n, m_n, stride_d, g0, SIDE.dim, SIDE.grad, True)
    else:
        return b_x


@triton.jit
def gathered_gradient_kernel(
    q_a, k_a, q_b, k_b, w_b, strides_qa, strides_ka, strides_qb, strides_kb, strides_wb, m_a, l_a, m_b, l_b, weight,
    mean, peak, peak_w, dq_a, dk_a, dq_b, dk_b, dw_b, sum_p, sum_acc, topk, strides_t, columns, per_topk_head, cu,
    extent, scale_a, scale_b, blocks, head_groups, parts, pieces,
    A: tl.constexpr, B: tl.constexpr, GROUP: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr,
    TARGET_ROWS: tl.constexpr, KEYS: tl.constexpr, WANT_A: tl.constexpr, WANT_B: tl.constexpr, LOSS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """DQ, dW and the query's contribution to dK: of one of ``parts`` of a head group, one of ``pieces`` of the columns.

    Head by head (``B.heads == 0``) the rows of a tile are distributions. Against a head mean they are the ``B.heads``
    heads of one distribution, which all have its derivative.
    """
    PAIRED: tl.constexpr = B.heads == 0
    STATES: tl.constexpr = ROWS if PAIRED else 1
    HEADS: tl.constexpr = GROUP.pack if PAIRED else B.heads
    i, head_group, batch, part, q_start, q_len, k_start, k_len = my_query(
        blocks, head_groups, parts * pieces, cu, extent, MASK
    )
    piece = part % pieces
    part = part // pieces
    o_hb, m_h, o_head = own_rows(part, head_group, head_groups, batch, i, q_start, q_len, extent[0], HEADS, ROWS)
    o_h, m_q, o_row = o_hb, m_h, o_head
    if not PAIRED:
        o_h, m_q, o_row = own_rows(part * 0, head_group, head_groups, batch, i, q_start, q_len, extent[0], 1, 1)
    p_topk = row_pointers(topk, strides_t, batch, head_group * GROUP.pack // per_topk_head, q_start + i)
    r_l = tl.load(l_b + o_row, mask=m_q, other=IGNORED)
    r_m = tl.load(m_b + o_row, mask=m_q, other=0.0)
    r_w = tl.load(weight + o_row, mask=m_q, other=0.0)
    # Ignored rows may hold anything. A row that is not finite has a row max of nan, and so derivatives of nan; its
    # query is not read, so that nan reaches only the keys that it sees.
    m_live = m_q & ~(r_l >= IGNORED)
    seen = seen_columns(p_topk, strides_t[3], columns, i, i + 1, q_len, k_len, extent, MASK)
    seen = tl.where(tl.max(m_live.to(tl.int32), 0) > 0, seen, 0)

    p_ka = row_pointers(k_a, strides_ka, batch, head_group * 0, k_start)
    p_kb = row_pointers(k_b, strides_kb, batch, head_group * GROUP.pack // B.per_kv, k_start)
    p_qa = row_pointers(q_a, strides_qa, batch, o_h * GROUP.size, q_start + i)
    p_qb = row_pointers(q_b, strides_qb, batch, o_hb, q_start + i)
    g0_a = piece * A.grad
    g0_b = piece * B.grad
    m_qa, m_qb = m_live, m_h & m_live
    if WANT_B:
        m_qb &= tl.abs(r_m) < float("inf")
    r_ma, r_la, r_mean, b_qa, b_qag, b_qbg = r_m, r_l, r_w, 0, 0, 0
    if PAIRED:
        p_ka += (head_group * GROUP.pack // A.per_kv).to(tl.int64) * strides_ka[1]
        r_ma = tl.load(m_a + o_row, mask=m_live, other=0.0)
        r_la = tl.load(l_a + o_row, mask=m_live, other=IGNORED)
        if WANT_A:
            r_mean = tl.load(mean + o_row, mask=m_live, other=0.0)
            m_qa &= tl.abs(r_ma) < float("inf")
        b_qa = held(p_qa, m_qa, strides_qa[3], A)
    b_qb = held(p_qb, m_qb, strides_qb[3], B)
    p_w, stride_wh, r_wh, r_dw = 0, 0, 0, 0.0
    if B.weighted:
        p_w = row_pointers(w_b, strides_wb, batch, head_group * B.heads, q_start + i)
        stride_wh = strides_wb[1]
        r_wh = head_weights(row_pointers(w_b, strides_wb, batch, o_hb, q_start + i), m_h & m_live)
        r_dw = tl.zeros([ROWS], tl.float32)
    index = index_peak(peak_w, q_b.dtype.element_ty, B)
    fa = unboosted(scale_a, peak, q_a.dtype.element_ty, BOOST_A, HALF)
    fb = unboosted(scale_b, peak, q_b.dtype.element_ty, BOOST_B, HALF) * index
    b_dqa, b_dqb = 0.0, 0.0
    if WANT_A:
        b_dqa = zeros(ROWS, A.grad)
        b_qag = _columns(b_qa, p_qa, m_qa, strides_qa[3], g0_a, A)
    if WANT_B:
        b_dqb = zeros(ROWS, B.grad)
        b_qbg = _columns(b_qb, p_qb, m_qb, strides_qb[3], g0_b, B)
    o_ka = (batch.to(tl.int64) * (head_groups * GROUP.pack // A.per_kv) + head_group * GROUP.pack // A.per_kv) * extent[
        1
    ] + k_start
    o_kb = (batch.to(tl.int64) * (head_groups * GROUP.pack // B.per_kv) + head_group * GROUP.pack // B.per_kv) * extent[
        1
    ] + k_start
    s = tl.zeros([STATES], tl.float32)
    acc = tl.zeros([STATES], tl.float32)
    for c0 in range(0, seen, KEYS):
        o_c = c0 + tl.arange(0, KEYS)
        o_j, m_j = selected_keys(p_topk, strides_t[3], o_c, columns, i, i + 1, q_len, k_len, extent, MASK)
        m_pair = m_j[None, :]
        p_ja, p_jb = p_ka + o_j * strides_ka[2], p_kb + o_j * strides_kb[2]
        if PAIRED:
            b_ka = held(p_ja, m_j, strides_ka[3], A)
            b_sa = product(
                b_qa, b_ka, p_qa, m_qa, strides_qa[3], p_ja, m_j, strides_ka[3], extent[4], ROWS, KEYS, A, True
            )  # fmt: skip
            b_a = shifted(b_sa, scale_a, r_ma, m_pair, A, True)
            b_za = log2_probabilities(b_a, r_la)
            b_p = tl.exp2(b_za)
        else:
            o_row_a = ((batch.to(tl.int64) * head_groups + head_group) * GROUP.size) * extent[0] + q_start + i
            b_p = gathered_target(
                p_qa, m_a + o_row_a, l_a + o_row_a, m_live, strides_qa[1], strides_qa[3], extent[0], extent[4], p_ja,
                m_j, strides_ka[1], strides_ka[3], head_group * GROUP.size, scale_a, TARGET_ROWS, KEYS, A, GROUP,
            )  # fmt: skip
            b_za = tl.log2(tl.maximum(b_p, SMALLEST))  # used if the mean is over one head

        b_kb = held(p_jb, m_j, strides_kb[3], B)
        b_sb = product(
            b_qb, b_kb, p_qb, m_qb, strides_qb[3], p_jb, m_j, strides_kb[3], extent[5], ROWS, KEYS, B, True
        )  # fmt: skip
        b_y = logits(b_sb, scale_b, B)
        if PAIRED:
            b_x = b_y
        elif B.heads <= ROWS:
            b_x = weighted_sum(b_y, r_wh, m_h, ROWS, B)
        else:
            p_q = row_pointers(q_b, strides_qb, batch, head_group * B.heads, q_start + i)
            b_x = gathered_logits(
                p_q, m_live, strides_qb[1], strides_qb[3], p_w, stride_wh, b_kb, p_jb, m_j, strides_kb[3], extent[5],
                scale_b, ROWS, KEYS, B,
            )  # fmt: skip
        b_b = tl.where(m_pair, b_x - r_m[:, None], NONE)
        b_zb = log2_probabilities(b_b, r_l)

        if LOSS:
            tile_s, tile_acc = loss_terms(b_p, b_za, b_zb, GROUP)
            s += tile_s
            acc += tile_acc
        if WANT_A:
            b_d = b_p * (b_a - b_b - r_mean[:, None])
            b_d = derivative(b_d, b_sa, scale_a, r_w, m_pair, m_live, q_a.dtype.element_ty, BOOST_A, A, True)
            b_dqa = dot_add(b_d, _columns(b_ka, p_ja, m_j, strides_ka[3], g0_a, A), b_dqa, A.upcast)
            b_dk = dot(tl.trans(b_d), b_qag, A.upcast) * fa
            store_rows(dk_a + (o_ka + o_j) * A.dim, m_j, b_dk, g0_a, A.dim, A.grad, True)
        if WANT_B:
            b_d = tl.exp2(b_zb) * GROUP.size - b_p
            r_d = r_w * (1.0 / GROUP.size)
            if PAIRED:
                b_d = derivative(b_d, b_sb, scale_b, r_d, m_pair, m_live, q_b.dtype.element_ty, BOOST_B, B, True)
            else:
                b_d = derivative(b_d, b_sb, scale_b, r_d, m_pair, m_live, tl.float32, BOOST_B, B, True)
                if B.weighted:
                    r_dw += weight_terms(b_d, b_y, m_pair, True)
                above = tl.where(tl.abs(r_m) < float("inf"), 0.0, -1.0)
                b_d = tl.broadcast_to(b_d, [ROWS, KEYS])
                b_d = head_derivative(b_d, b_y, r_wh, above, index, q_b.dtype.element_ty, B)
            b_dqb = dot_add(b_d, _columns(b_kb, p_jb, m_j, strides_kb[3], g0_b, B), b_dqb, B.upcast)
            b_dk = dot(tl.trans(b_d), b_qbg, B.upcast) * fb
            store_rows(dk_b + (o_kb + o_j) * B.dim, m_j, b_dk, g0_b, B.dim, B.grad, True)

    if LOSS:
        first = (piece == 0) & (PAIRED | (part == 0))
        tl.store(sum_p + o_row, tl.where(m_live, s, 0.0), mask=m_q & first)
        tl.store(sum_acc + o_row, tl.where(m_live, acc, 0.0), mask=m_q & first)
    m_own = m_h & m_live
    if WANT_A:
        store_rows(dq_a + o_row * A.dim, m_q, tl.where(m_own[:, None], b_dqa * fa, 0.0), g0_a, A.dim, A.grad, False)
    if WANT_B:
        store_rows(dq_b + o_head * B.dim, m_h, tl.where(m_own[:, None], b_dqb * fb, 0.0), g0_b, B.dim, B.grad, False)
        if B.weighted:
            r_dw = tl.where(m_own, r_dw * unboosted(1.0, peak, tl.float32, BOOST_B, HALF), 0.0)
            tl.store(dw_b + o_head, r_dw.to(dw_b.dtype.element_ty), mask=m_h & (piece == 0))
