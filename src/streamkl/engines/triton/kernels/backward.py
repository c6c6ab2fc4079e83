"""The backward passes.

`keys_kernel` owns a block of keys: dK stays in registers during the walk over the rows, and dQ is accumulated in
float32 by atomic additions, so each tile is computed once. The deterministic pair is `keys_kernel` without these
additions and `queries_kernel`, which owns a block of rows: results do not depend on the order of programs. Either also
sums the rows' losses for `train`.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
    allowed_pairs,
    dot,
    dot_add,
    find_sequence,
    finite,
    head_summed_logits,
    head_weights,
    key_tiles,
    load_tile,
    log2_probabilities,
    logits,
    masked_tile,
    my_block,
    packed_rows,
    product,
    row_pointers,
    row_tiles,
    target,
    zeros,
)


@triton.jit
def _held_columns(p_k, m_k, stride_d, g0, SIDE: tl.constexpr):
    """The columns of the keys that dQ needs, in pieces of at most ``[keys, 32]``; 0 where they are not finite."""
    WIDTH: tl.constexpr = min(SIDE.grad, 32)
    pieces = ()
    for n in tl.static_range(SIDE.grad // WIDTH):
        pieces = pieces + (finite(load_tile(p_k, m_k, stride_d, g0 + n * WIDTH, SIDE.dim, WIDTH, True, SIDE.grad)),)
    return pieces


@triton.jit
def _add_rows(p_dq, m_live, b_d, b_k, factor, g0, SIDE: tl.constexpr):
    """Adds a tile's contribution to dQ, ``[rows, grad]``, in float32, one piece of the columns at a time."""
    WIDTH: tl.constexpr = min(SIDE.grad, 32)
    for n in tl.static_range(SIDE.grad // WIDTH):
        b_dq = dot(b_d, b_k[n], SIDE.upcast) * factor
        o_d = g0 + n * WIDTH + tl.arange(0, WIDTH)
        mask = m_live[:, None] & (o_d < SIDE.dim)[None, :]
        tl.atomic_add(p_dq[:, None] + o_d[None, :], b_dq, mask=mask, sem="relaxed")


@triton.jit
def _add_index_heads(
    b_dk, b_d, b_k, b_kg, p_q, m_q, strides_q, p_w, strides_w, p_k, m_k, stride_kd, p_dq, p_dw, m_live, m_pair, above,
    nq, dim, scale, factor, factor_w, peak, g0, first_piece,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SIDE: tl.constexpr, DQ: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of an indexer's heads to dK, and with ``DQ`` to dQ and dW; ``b_d`` is that of their sum.

    Pointers are those of the first head. The scores of each head are recomputed: no tile has room for all of them.
    """
    for _ in range(SIDE.heads):
        b_q = 0
        if not SIDE.chunked:
            b_q = load_tile(p_q, m_q, strides_q[3], 0, SIDE.dim, SIDE.block, True)
        b_s = product(b_q, b_k, p_q, m_q, strides_q[3], p_k, m_k, stride_kd, dim, ROWS, KEYS, SIDE, True)
        b_y = logits(b_s, scale, SIDE)
        w = 0
        if SIDE.weighted:
            w = head_weights(p_w, m_q)
            p_w += strides_w[1]
            if DQ:
                dw = weight_terms(b_d, b_y, m_pair, MASKED) * factor_w
                tl.atomic_add(p_dw, dw, mask=m_live & first_piece, sem="relaxed")
                p_dw += nq
        b_x = head_derivative(b_d, b_y, w, above, peak, p_q.dtype.element_ty, SIDE)
        if SIDE.chunked:
            b_q = load_tile(p_q, m_q, strides_q[3], g0, SIDE.dim, SIDE.grad, True)
        b_dk = dot_add(tl.trans(b_x), b_q, b_dk, SIDE.upcast)
        if DQ:
            _add_rows(p_dq, m_live, b_x, b_kg, factor, g0, SIDE)
            p_dq += nq.to(tl.int64) * SIDE.dim
        p_q += strides_q[1]
    return b_dk


@triton.jit
def _key_pass(
    b_dka, b_dkb, b_ka, b_kb, b_kag, b_kbg, q_a, q_b, w_b, p_ka, p_kb, strides_qa, strides_ka, strides_qb, strides_kb,
    strides_wb, m_a, l_a, m_b, l_b, weight, mean, dq_a, dq_b, dw_b, sum_p, sum_acc, head_group, head_groups, batch,
    q_start, q_len, k_len, extent, o_j, m_j, scale_a, scale_b, factor_a, factor_b, factor_w, peak_w, g0_a, g0_b,
    first_piece, tiles,
    A: tl.constexpr, B: tl.constexpr, GROUP: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, WANT_A: tl.constexpr, WANT_B: tl.constexpr, DQ: tl.constexpr, LOSS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of the full tiles of rows, or of the masked ones, to dK."""
    count = tiles[3] - tiles[2]
    if MASKED:
        count = tiles[1] - tiles[0] - count
    for n in range(count):
        if MASKED:
            t = masked_tile(n, tiles[0], tiles[2], tiles[3])
        else:
            t = tiles[2] + n
        o_i, o_h, m_q, o_row = packed_rows(
            t, head_group, batch, q_start, q_len, extent[0], head_groups, GROUP.pack, ROWS
        )
        m_pair = m_q[:, None]
        if MASKED:
            m_pair = allowed_pairs(o_i, o_j, q_len, k_len, extent, MASK)
            r_l = tl.load(l_b + o_row, mask=m_q, other=IGNORED)
            r_m = tl.load(m_b + o_row, mask=m_q, other=0.0)
            r_w = tl.load(weight + o_row, mask=m_q, other=0.0)
        else:
            r_l = tl.load(l_b + o_row)
            r_m = tl.load(m_b + o_row)
            r_w = tl.load(weight + o_row)
        # Ignored rows may hold anything. A row that is not finite has a row max of nan, and so derivatives of nan; its
        # query is not read, so that nan reaches only the keys that it sees.
        m_live = m_q & ~(r_l >= IGNORED)

        if GROUP.size == 1:
            p_qa = row_pointers(q_a, strides_qa, batch, o_h, q_start + o_i)
            b_qa = 0
            r_ma = tl.load(m_a + o_row, mask=m_live, other=0.0)
            m_qa = m_live
            if WANT_A:
                m_qa &= tl.abs(r_ma) < float("inf")
            if not A.chunked:
                b_qa = load_tile(p_qa, m_qa, strides_qa[3], 0, A.dim, A.block, True)
            b_sa = product(
                b_qa, b_ka, p_qa, m_qa, strides_qa[3], p_ka, m_j, strides_ka[3], extent[4], ROWS, KEYS, A, True
            )
            r_la = tl.load(l_a + o_row, mask=m_live, other=IGNORED)
            b_a = shifted(b_sa, scale_a, r_ma, m_pair, A, MASKED)
            b_za = log2_probabilities(b_a, r_la)
            b_p = tl.exp2(b_za)
        else:
            o_row_a = (batch.to(tl.int64) * (head_groups * GROUP.pack) + o_h) * GROUP.size * extent[0] + q_start + o_i
            p_qa = row_pointers(q_a, strides_qa, batch, o_h * GROUP.size, q_start + o_i)
            b_p = target(
                p_qa, m_a + o_row_a, l_a + o_row_a, m_live, strides_qa[1], strides_qa[3], extent[0], extent[4],
                p_ka, m_j, strides_ka[1], strides_ka[3], head_group * GROUP.pack * GROUP.size, scale_a, m_pair,
                ROWS, KEYS, A, GROUP, MASKED,
            )  # fmt: skip
            b_a, b_za = b_p, b_p

        p_q = row_pointers(q_b, strides_qb, batch, o_h, q_start + o_i)
        b_qb = 0
        m_qb = m_live
        if WANT_B:
            m_qb &= tl.abs(r_m) < float("inf")
        p_w, stride_wh = 0, 0
        if B.weighted:
            p_w = row_pointers(w_b, strides_wb, batch, o_h, q_start + o_i)
            stride_wh = strides_wb[1]
        if B.heads > 0:
            b_sb = head_summed_logits(
                p_q, m_qb, strides_qb[1], strides_qb[3], p_w, stride_wh, b_kb, p_kb, m_j, strides_kb[3], extent[5],
                scale_b, ROWS, KEYS, B, True,
            )  # fmt: skip
        else:
            if not B.chunked:
                b_qb = load_tile(p_q, m_qb, strides_qb[3], 0, B.dim, B.block, True)
            b_sb = product(
                b_qb, b_kb, p_q, m_qb, strides_qb[3], p_kb, m_j, strides_kb[3], extent[5], ROWS, KEYS, B, True
            )
        b_b = shifted(b_sb, scale_b, r_m, m_pair, B, MASKED)
        b_zb = log2_probabilities(b_b, r_l)

        if LOSS:
            s, acc = loss_terms(b_p, b_za, b_zb, GROUP)
            tl.atomic_add(sum_p + o_row, s, mask=m_live & first_piece, sem="relaxed")
            tl.atomic_add(sum_acc + o_row, acc, mask=m_live & first_piece, sem="relaxed")
        if WANT_A:
            r_mean = tl.load(mean + o_row, mask=m_live, other=0.0)
            b_d = b_p * (b_a - b_b - r_mean[:, None])
            b_d = derivative(b_d, b_sa, scale_a, r_w, m_pair, m_live, q_a.dtype.element_ty, BOOST_A, A, MASKED)
            if A.chunked:
                b_qa = load_tile(p_qa, m_qa, strides_qa[3], g0_a, A.dim, A.grad, True)
            b_dka = dot_add(tl.trans(b_d), b_qa, b_dka, A.upcast)
            if DQ:
                _add_rows(dq_a + o_row * A.dim, m_live, b_d, b_kag, factor_a, g0_a, A)
        if B.heads > 0:
            b_d = tl.exp2(b_zb) * GROUP.size - b_p
            b_d = derivative(
                b_d, b_sb, scale_b, r_w * (1.0 / GROUP.size), m_pair, m_live, tl.float32, BOOST_B, B, MASKED
            )
            o_head = (batch.to(tl.int64) * B.heads + o_h) * extent[0] + q_start + o_i
            p_dw = 0
            if B.weighted and DQ:
                p_dw = dw_b + o_head
            above = tl.where(tl.abs(r_m) < float("inf"), 0.0, -1.0)
            b_dkb = _add_index_heads(
                b_dkb, b_d, b_kb, b_kbg, p_q, m_qb, strides_qb, p_w, strides_wb, p_kb, m_j, strides_kb[3],
                dq_b + o_head * B.dim, p_dw, m_live, m_pair, above, extent[0], extent[5], scale_b, factor_b, factor_w,
                peak_w, g0_b, first_piece, ROWS, KEYS, B, DQ, MASKED,
            )  # fmt: skip
        elif WANT_B:
            b_d = tl.exp2(b_zb) * GROUP.size - b_p
            b_d = derivative(
                b_d, b_sb, scale_b, r_w * (1.0 / GROUP.size), m_pair, m_live, q_b.dtype.element_ty, BOOST_B, B, MASKED
            )
            if B.chunked:
                b_qb = load_tile(p_q, m_qb, strides_qb[3], g0_b, B.dim, B.grad, True)
            b_dkb = dot_add(tl.trans(b_d), b_qb, b_dkb, B.upcast)
            if DQ:
                _add_rows(dq_b + o_row * B.dim, m_live, b_d, b_kbg, factor_b, g0_b, B)
    return b_dka, b_dkb


@triton.jit
def keys_kernel(
    q_a, k_a, q_b, k_b, w_b, strides_qa, strides_ka, strides_qb, strides_kb, strides_wb, m_a, l_a, m_b, l_b, weight,
    mean, peak, peak_w, dq_a, dk_a, dq_b, dk_b, dw_b, sum_p, sum_acc, cu, extent, scale_a, scale_b,
    blocks, owners, pieces, span, splits,
    A: tl.constexpr, B: tl.constexpr, GROUP: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, WANT_A: tl.constexpr, WANT_B: tl.constexpr, DQ: tl.constexpr, LOSS: tl.constexpr,
    ATOMIC_A: tl.constexpr, ATOMIC_B: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """DK of a block of keys over the ``span`` head groups that read it, and with ``DQ`` their part of dQ.

    It computes one of ``pieces`` of a wide gradient's columns, from one of ``splits`` of the rows.
    """
    block, owner, batch, part = my_block(blocks, owners, pieces * splits)
    piece = part % pieces
    split = part // pieces
    batch, q_start, q_len, k_start, k_len, block = find_sequence(block, batch, cu, extent, 1, 1, KEYS, MASK)
    head_groups = owners * span
    o_j = block * KEYS + tl.arange(0, KEYS)
    m_j = o_j < k_len
    g0_a = piece * A.grad
    g0_b = piece * B.grad
    fa = unboosted(scale_a, peak, q_a.dtype.element_ty, BOOST_A, HALF)
    fb = unboosted(scale_b, peak, q_b.dtype.element_ty, BOOST_B, HALF)
    fw = unboosted(1.0, peak, tl.float32, BOOST_B, HALF)
    index = index_peak(peak_w, q_b.dtype.element_ty, B)
    fb = fb * index
    j0 = block * KEYS
    tiles = row_tiles(
        j0, tl.minimum(j0 + KEYS, k_len), q_len, k_len, extent, split, splits, ROWS, KEYS, GROUP.pack, MASK
    )  # fmt: skip
    b_dka, b_dkb = 0.0, 0.0
    if WANT_A:
        b_dka = zeros(KEYS, A.grad)
    if WANT_B:
        b_dkb = zeros(KEYS, B.grad)
    for u in range(span):
        head_group = owner * span + u
        kv_a = head_group * GROUP.pack // A.per_kv
        if GROUP.size > 1:
            kv_a = head_group * 0  # `target` walks the key heads itself
        p_ka = row_pointers(k_a, strides_ka, batch, kv_a, k_start + o_j)
        p_kb = row_pointers(k_b, strides_kb, batch, head_group * GROUP.pack // B.per_kv, k_start + o_j)
        b_ka, b_kb, b_kag, b_kbg = 0, 0, 0, 0
        if GROUP.size == 1 and not A.chunked:
            b_ka = load_tile(p_ka, m_j, strides_ka[3], 0, A.dim, A.block, True)
        if not B.chunked:
            b_kb = load_tile(p_kb, m_j, strides_kb[3], 0, B.dim, B.block, True)
        if WANT_A and DQ:
            b_kag = _held_columns(p_ka, m_j, strides_ka[3], g0_a, A)
        if WANT_B and DQ:
            b_kbg = _held_columns(p_kb, m_j, strides_kb[3], g0_b, B)
        b_dka, b_dkb = _key_pass(
            b_dka, b_dkb, b_ka, b_kb, b_kag, b_kbg, q_a, q_b, w_b, p_ka, p_kb, strides_qa, strides_ka, strides_qb,
            strides_kb, strides_wb, m_a, l_a, m_b, l_b, weight, mean, dq_a, dq_b, dw_b, sum_p, sum_acc, head_group,
            head_groups, batch, q_start, q_len, k_len, extent, o_j, m_j, scale_a, scale_b, fa, fb, fw, index, g0_a,
            g0_b, piece == 0, tiles,
            A, B, GROUP, MASK, ROWS, KEYS, WANT_A, WANT_B, DQ, LOSS, False,
        )  # fmt: skip
        b_dka, b_dkb = _key_pass(
            b_dka, b_dkb, b_ka, b_kb, b_kag, b_kbg, q_a, q_b, w_b, p_ka, p_kb, strides_qa, strides_ka, strides_qb,
            strides_kb, strides_wb, m_a, l_a, m_b, l_b, weight, mean, dq_a, dq_b, dw_b, sum_p, sum_acc, head_group,
            head_groups, batch, q_start, q_len, k_len, extent, o_j, m_j, scale_a, scale_b, fa, fb, fw, index, g0_a,
            g0_b, piece == 0, tiles,
            A, B, GROUP, MASK, ROWS, KEYS, WANT_A, WANT_B, DQ, LOSS, True,
        )  # fmt: skip
    o_n = (k_start + o_j).to(tl.int64)
    first = owner * span * GROUP.pack
    if WANT_A:
        kv = (batch.to(tl.int64) * (head_groups * GROUP.pack // A.per_kv) + first // A.per_kv) * extent[1]
        store_rows(dk_a + (kv + o_n) * A.dim, m_j, b_dka * fa, g0_a, A.dim, A.grad, ATOMIC_A)
    if WANT_B:
        kv = (batch.to(tl.int64) * (head_groups * GROUP.pack // B.per_kv) + first // B.per_kv) * extent[1]
        store_rows(dk_b + (kv + o_n) * B.dim, m_j, b_dkb * fb, g0_b, B.dim, B.grad, ATOMIC_B)


@triton.jit
def _query_pass(
    b_dqa, b_dqb, r_dw, sum_p, sum_acc, b_qa, b_qb, p_qa, p_qb, p_wb, p_ma, p_la, p_ka, p_kb, strides_qa, strides_ka,
    strides_qb, strides_kb, stride_wh, r_ma, r_la, r_m, r_l, r_w, r_wh, r_mean, o_i, m_live, first_head, head, q_len,
    k_len, extent, scale_a, scale_b, peak_w, g0_a, g0_b, tiles,
    A: tl.constexpr, B: tl.constexpr, GROUP: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, WANT_A: tl.constexpr, WANT_B: tl.constexpr, LOSS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Adds the contribution of the full tiles of keys, or of the masked ones, to dQ; for an indexer, of one head."""
    count = tiles[3] - tiles[2]
    if MASKED:
        count = tiles[1] - tiles[0] - count
    for n in range(count):
        if MASKED:
            t = masked_tile(n, tiles[0], tiles[2], tiles[3])
        else:
            t = tiles[2] + n
        o_j = t * KEYS + tl.arange(0, KEYS)
        m_j = o_j < k_len
        m_pair = m_j[None, :]
        if MASKED:
            m_pair = allowed_pairs(o_i, o_j, q_len, k_len, extent, MASK)
        p_ja = p_ka + o_j.to(tl.int64) * strides_ka[2]
        if GROUP.size == 1:
            b_ka = 0
            if not A.chunked:
                b_ka = load_tile(p_ja, m_j, strides_ka[3], 0, A.dim, A.block, MASKED)
                if MASKED and WANT_A:
                    b_ka = finite(b_ka)
            b_sa = product(
                b_qa, b_ka, p_qa, m_live, strides_qa[3], p_ja, m_j, strides_ka[3], extent[4], ROWS, KEYS, A, MASKED
            )
            b_a = shifted(b_sa, scale_a, r_ma, m_pair, A, MASKED)
            b_za = log2_probabilities(b_a, r_la)
            b_p = tl.exp2(b_za)
        else:
            b_p = target(
                p_qa, p_ma, p_la, m_live, strides_qa[1], strides_qa[3], extent[0], extent[4], p_ja, m_j, strides_ka[1],
                strides_ka[3], first_head, scale_a, m_pair, ROWS, KEYS, A, GROUP, MASKED,
            )  # fmt: skip
            b_a, b_za = b_p, b_p

        p_j = p_kb + o_j.to(tl.int64) * strides_kb[2]
        b_kb = 0
        if not B.chunked:
            b_kb = load_tile(p_j, m_j, strides_kb[3], 0, B.dim, B.block, MASKED)
            if MASKED and WANT_B:
                b_kb = finite(b_kb)
        if B.heads > 0:
            b_sb = head_summed_logits(
                p_qb, m_live, strides_qb[1], strides_qb[3], p_wb, stride_wh, b_kb, p_j, m_j, strides_kb[3], extent[5],
                scale_b, ROWS, KEYS, B, MASKED,
            )  # fmt: skip
        else:
            b_sb = product(
                b_qb, b_kb, p_qb, m_live, strides_qb[3], p_j, m_j, strides_kb[3], extent[5], ROWS, KEYS, B, MASKED
            )
        b_b = shifted(b_sb, scale_b, r_m, m_pair, B, MASKED)
        b_zb = log2_probabilities(b_b, r_l)

        if LOSS:
            s, acc = loss_terms(b_p, b_za, b_zb, GROUP)
            sum_p += s
            sum_acc += acc
        if WANT_A:
            b_d = b_p * (b_a - b_b - r_mean[:, None])
            b_d = derivative(b_d, b_sa, scale_a, r_w, m_pair, m_live, p_qa.dtype.element_ty, BOOST_A, A, MASKED)
            if A.chunked:
                b_ka = load_tile(p_ja, m_j, strides_ka[3], g0_a, A.dim, A.grad, MASKED)
                if MASKED:
                    b_ka = finite(b_ka)
            b_dqa = dot_add(b_d, b_ka, b_dqa, A.upcast)
        if WANT_B:
            b_d = tl.exp2(b_zb) * GROUP.size - b_p
            if B.heads > 0:
                b_d = derivative(
                    b_d, b_sb, scale_b, r_w * (1.0 / GROUP.size), m_pair, m_live, tl.float32, BOOST_B, B, MASKED
                )
                p_head = p_qb + head.to(tl.int64) * strides_qb[1]
                b_sb = product(
                    b_qb, b_kb, p_head, m_live, strides_qb[3], p_j, m_j, strides_kb[3], extent[5], ROWS, KEYS, B, MASKED
                )
                b_y = logits(b_sb, scale_b, B)
                above = tl.where(tl.abs(r_m) < float("inf"), 0.0, -1.0)
                if B.weighted:
                    r_dw += weight_terms(b_d, b_y, m_pair, MASKED)
                b_d = head_derivative(b_d, b_y, r_wh, above, peak_w, p_qb.dtype.element_ty, B)
            else:
                b_d = derivative(
                    b_d, b_sb, scale_b, r_w * (1.0 / GROUP.size), m_pair, m_live, p_qb.dtype.element_ty, BOOST_B, B,
                    MASKED,
                )  # fmt: skip
            if B.chunked:
                b_kb = load_tile(p_j, m_j, strides_kb[3], g0_b, B.dim, B.grad, MASKED)
                if MASKED:
                    b_kb = finite(b_kb)
            b_dqb = dot_add(b_d, b_kb, b_dqb, B.upcast)
    return b_dqa, b_dqb, r_dw, sum_p, sum_acc


@triton.jit
def queries_kernel(
    q_a, k_a, q_b, k_b, w_b, strides_qa, strides_ka, strides_qb, strides_kb, strides_wb, m_a, l_a, m_b, l_b, weight,
    mean, peak, peak_w, dq_a, dq_b, dw_b, out_p, out_acc, cu, extent, scale_a, scale_b,
    blocks, head_groups, pieces, splits, rows,
    A: tl.constexpr, B: tl.constexpr, GROUP: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, WANT_A: tl.constexpr, WANT_B: tl.constexpr, LOSS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """DQ of a block of packed rows: one of ``pieces`` of its columns, from one of ``splits`` of the keys.

    ``dq`` is ``[splits, B, heads, Nq, D]``, the sums of a loss are ``[splits, B, R, Nq]``. Each head of an indexer has
    a program of its own, which computes dW of its head as well.
    """
    HEADS: tl.constexpr = max(B.heads, 1)
    block, head_group, batch, part = my_block(blocks, head_groups, pieces * HEADS * splits)
    piece = part % pieces
    head = part // pieces % HEADS
    split = part // pieces // HEADS
    block = blocks - 1 - block
    batch, q_start, q_len, k_start, k_len, block = find_sequence(block, batch, cu, extent, 0, GROUP.pack, ROWS, MASK)
    o_i, o_h, m_q, o_row = packed_rows(
        block, head_group, batch, q_start, q_len, extent[0], head_groups, GROUP.pack, ROWS
    )
    o_row_a = (batch.to(tl.int64) * (head_groups * GROUP.pack) + o_h) * GROUP.size * extent[0] + q_start + o_i
    r_l = tl.load(l_b + o_row, mask=m_q, other=IGNORED)
    r_m = tl.load(m_b + o_row, mask=m_q, other=0.0)
    r_w = tl.load(weight + o_row, mask=m_q, other=0.0)
    m_live = m_q & ~(r_l >= IGNORED)  # the others may hold anything
    r_ma, r_la, r_mean = r_m, r_l, r_w
    if GROUP.size == 1:
        r_ma = tl.load(m_a + o_row, mask=m_live, other=0.0)
        r_la = tl.load(l_a + o_row, mask=m_live, other=IGNORED)
    if WANT_A:
        r_mean = tl.load(mean + o_row, mask=m_live, other=0.0)
    p_qa = row_pointers(q_a, strides_qa, batch, o_h * GROUP.size, q_start + o_i)
    p_qb = row_pointers(q_b, strides_qb, batch, o_h, q_start + o_i)
    kv_a = head_group * GROUP.pack // A.per_kv
    if GROUP.size > 1:
        kv_a = head_group * 0  # `target` walks the key heads itself
    p_ka = row_pointers(k_a, strides_ka, batch, kv_a, k_start)
    p_kb = row_pointers(k_b, strides_kb, batch, head_group * GROUP.pack // B.per_kv, k_start)
    b_qa, b_qb = 0, 0
    if GROUP.size == 1 and not A.chunked:
        b_qa = load_tile(p_qa, m_live, strides_qa[3], 0, A.dim, A.block, True)
    if not B.chunked:
        b_qb = load_tile(p_qb + head.to(tl.int64) * strides_qb[1], m_live, strides_qb[3], 0, B.dim, B.block, True)
    p_wb, stride_wh, r_wh, r_dw = 0, 0, r_w, 0.0
    if B.weighted:
        p_wb = row_pointers(w_b, strides_wb, batch, o_h, q_start + o_i)
        stride_wh = strides_wb[1]
        r_wh = head_weights(p_wb + head.to(tl.int64) * stride_wh, m_live)
        r_dw = tl.zeros([ROWS], tl.float32)
    index = index_peak(peak_w, q_b.dtype.element_ty, B)
    g0_a = piece * A.grad
    g0_b = piece * B.grad
    b_dqa, b_dqb = 0.0, 0.0
    if WANT_A:
        b_dqa = zeros(ROWS, A.grad)
    if WANT_B:
        b_dqb = zeros(ROWS, B.grad)
    sum_p = tl.zeros([ROWS], tl.float32)
    sum_acc = tl.zeros([ROWS], tl.float32)

    i0 = block * ROWS // GROUP.pack
    i1 = tl.minimum((block * ROWS + ROWS - 1) // GROUP.pack + 1, q_len)
    tiles = key_tiles(i0, i1, q_len, k_len, extent, split, splits, KEYS, MASK)
    b_dqa, b_dqb, r_dw, sum_p, sum_acc = _query_pass(
        b_dqa, b_dqb, r_dw, sum_p, sum_acc, b_qa, b_qb, p_qa, p_qb, p_wb, m_a + o_row_a, l_a + o_row_a, p_ka, p_kb,
        strides_qa, strides_ka, strides_qb, strides_kb, stride_wh, r_ma, r_la, r_m, r_l, r_w, r_wh, r_mean, o_i,
        m_live, head_group * GROUP.pack * GROUP.size, head, q_len, k_len, extent, scale_a, scale_b, index, g0_a, g0_b,
        tiles, A, B, GROUP, MASK, ROWS, KEYS, WANT_A, WANT_B, LOSS, False,
    )  # fmt: skip
    b_dqa, b_dqb, r_dw, sum_p, sum_acc = _query_pass(
        b_dqa, b_dqb, r_dw, sum_p, sum_acc, b_qa, b_qb, p_qa, p_qb, p_wb, m_a + o_row_a, l_a + o_row_a, p_ka, p_kb,
        strides_qa, strides_ka, strides_qb, strides_kb, stride_wh, r_ma, r_la, r_m, r_l, r_w, r_wh, r_mean, o_i,
        m_live, head_group * GROUP.pack * GROUP.size, head, q_len, k_len, extent, scale_a, scale_b, index, g0_a, g0_b,
        tiles, A, B, GROUP, MASK, ROWS, KEYS, WANT_A, WANT_B, LOSS, True,
    )  # fmt: skip
    o_part = split.to(tl.int64) * rows + o_row
    if LOSS:
        first = (piece == 0) & (head == 0)
        tl.store(out_p + o_part, tl.where(m_live, sum_p, 0.0), mask=m_q & first)
        tl.store(out_acc + o_part, tl.where(m_live, sum_acc, 0.0), mask=m_q & first)
    if WANT_A:
        b_dqa = tl.where(m_live[:, None], b_dqa * unboosted(scale_a, peak, q_a.dtype.element_ty, BOOST_A, HALF), 0.0)
        store_rows(dq_a + o_part * A.dim, m_q, b_dqa, g0_a, A.dim, A.grad, False)
    if B.heads > 0:
        o_part = (split.to(tl.int64) * rows + batch.to(tl.int64) * extent[0]) * B.heads
        o_part += (head.to(tl.int64) * extent[0] + q_start) + o_i
        if B.weighted:
            r_dw = tl.where(m_live, r_dw * unboosted(1.0, peak, tl.float32, BOOST_B, HALF), 0.0)
            tl.store(dw_b + o_part, r_dw.to(dw_b.dtype.element_ty), mask=m_q & (piece == 0))
    if WANT_B:
        factor = unboosted(scale_b, peak, q_b.dtype.element_ty, BOOST_B, HALF) * index
        b_dqb = tl.where(m_live[:, None], b_dqb * factor, 0.0)
        store_rows(dq_b + o_part * B.dim, m_q, b_dqb, g0_b, B.dim, B.grad, False)
