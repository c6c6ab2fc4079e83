"""Sparse attention: a softmax over the keys of a list that a block of queries shares, and the values at them."""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.listed import held, named_keys, seen_columns
from streamkl.engines.triton.kernels.primitives import (
    NONE,
    allowed_pairs,
    dot_add,
    exp,
    load_tile,
    logits,
    my_block,
    product,
    row_pointers,
    zeros,
)


@triton.jit
def find_list(own, batch, cu, extent, block, MASK: tl.constexpr):
    """The sequence that a list belongs to, and the first of its queries: ``(q_start, q_len, k_start, k_len, i0)``.

    ``cu[6]`` has the first list of each packed sequence; lists past the last one's begin past its queries.
    """
    if MASK.packed:
        low = 0
        high = cu[4] - 1
        for _ in range(cu[5]):
            middle = (low + high + 1) // 2
            start = tl.load(cu[6] + middle)
            high = tl.where(start <= own, high, middle - 1)
            low = tl.where(start <= own, middle, low)
        q_start = tl.load(cu[0] + low * cu[2]).to(tl.int32)
        q_len = tl.load(cu[0] + (low + 1) * cu[2]).to(tl.int32) - q_start
        k_start = tl.load(cu[1] + low * cu[3]).to(tl.int32)
        k_len = tl.load(cu[1] + (low + 1) * cu[3]).to(tl.int32) - k_start
        return q_start, q_len, k_start, k_len, (own - tl.load(cu[6] + low)) * block
    else:
        return batch * 0, extent[0], batch * 0, extent[1], own * block


@triton.jit
def sparse_attention_kernel(
    q, k, v, out, strides_q, strides_k, strides_v, strides_o, topk, strides_t, columns, cu, extent, scale, block,
    lists, units, parts, pieces,
    SIDE: tl.constexpr, VALUE: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """``out [B, H, Nq, Dv]`` over the keys of ``topk [B, lists, columns]``; ``block`` queries share a list.

    Row ``m`` of a list and key head is query ``m // share`` of query head ``m % share``: a program has one of ``parts``
    of them, and one of ``pieces`` of the values' columns. Keys and values are gathered once for all of its rows.
    """
    own, unit, batch, part = my_block(lists, units, parts * pieces)
    own = lists - 1 - own  # the queries that see most keys first
    piece = part % pieces
    part = part // pieces
    q_start, q_len, k_start, k_len, i0 = find_list(own, batch, cu, extent, block, MASK)
    o_m = part * ROWS + tl.arange(0, ROWS)
    o_i = i0 + o_m // SIDE.share
    o_h = unit * SIDE.share + o_m % SIDE.share
    m_q = (o_m < block * SIDE.share) & (o_i < q_len)
    first = i0 + part * ROWS // SIDE.share
    last = tl.minimum(tl.minimum(i0 + (part * ROWS + ROWS - 1) // SIDE.share + 1, i0 + block), q_len)
    p_list = topk + batch.to(tl.int64) * strides_t[0] + own.to(tl.int64) * strides_t[1]
    seen = seen_columns(p_list, strides_t[2], columns, first, last, q_len, k_len, extent, MASK)
    p_q = row_pointers(q, strides_q, batch, o_h, q_start + o_i)
    p_k = row_pointers(k, strides_k, batch, unit, k_start)
    p_v = row_pointers(v, strides_v, batch, unit, k_start)
    b_q = held(p_q, m_q, strides_q[3], SIDE)
    g0 = piece * VALUE.grad
    m = tl.full([ROWS], NONE, tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = zeros(ROWS, VALUE.grad)
    for c0 in range(0, seen, KEYS):
        o_c = c0 + tl.arange(0, KEYS)
        o_j, m_j = named_keys(p_list, strides_t[2], o_c, columns, first, last, q_len, k_len, extent, MASK)
        p_j = p_k + o_j * strides_k[2]
        b_k = held(p_j, m_j, strides_k[3], SIDE)
        b_s = product(b_q, b_k, p_q, m_q, strides_q[3], p_j, m_j, strides_k[3], extent[4], ROWS, KEYS, SIDE, True)
        m_pair = m_j[None, :]
        if SHARED:
            m_pair = m_pair & allowed_pairs(o_i, o_j.to(tl.int32), q_len, k_len, extent, MASK)
        b_x = tl.where(m_pair, logits(b_s, scale, SIDE), NONE)
        top = tl.maximum(m, tl.max(b_x, 1))
        alpha = exp(m - top)
        b_x = exp(b_x - top[:, None])
        l = l * alpha + tl.sum(b_x, 1)
        b_v = load_tile(p_v + o_j * strides_v[2], m_j, strides_v[3], g0, VALUE.dim, VALUE.grad, True)
        acc = dot_add(b_x.to(v.dtype.element_ty), b_v, acc * alpha[:, None], VALUE.upcast)
        m = top
    # A row that saw no key has counted pairs that are not allowed; one whose logits are not numbers has nan for `l`.
    m_live = (m > NONE) | (l != l)
    acc = tl.where(m_live[:, None], tl.div_rn(acc, tl.broadcast_to(l[:, None], acc.shape)), 0.0)
    o_d = g0 + tl.arange(0, VALUE.grad)
    p_out = (
        row_pointers(out, strides_o, batch, o_h, q_start + o_i)[:, None] + (o_d.to(tl.int64) * strides_o[3])[None, :]
    )
    tl.store(p_out, acc.to(out.dtype.element_ty), mask=m_q[:, None] & (o_d < VALUE.dim)[None, :])
