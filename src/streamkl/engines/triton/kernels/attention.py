"""Sparse attention: a softmax over the selected keys of a query block, and the values at them."""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.gathered import held, seen_columns, selected_keys
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
def find_query_block(own, batch, cu, extent, query_block, MASK: tl.constexpr):
    """The sequence of a query block, and the block's first query: ``(q_start, q_len, k_start, k_len, i0)``.

    ``cu[6]`` has the first query block of each packed sequence; blocks past the last sequence begin past its queries.
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
        return q_start, q_len, k_start, k_len, (own - tl.load(cu[6] + low)) * query_block
    else:
        return batch * 0, extent[0], batch * 0, extent[1], own * query_block


@triton.jit
def sparse_attention_kernel(
    q, k, v, out, strides_q, strides_k, strides_v, strides_o, topk, strides_t, columns, cu, extent, scale, query_block,
    query_blocks, kv_heads, parts, pieces,
    SIDE: tl.constexpr, VALUE: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """``out [B, H, Nq, Dv]`` over ``topk [B, query_blocks, columns]``, shared by blocks of ``query_block`` queries.

    Row ``m`` of a query block and key head is query ``m // per_kv`` of query head ``m % per_kv``: a program has one of
    ``parts`` of the rows, and one of ``pieces`` of the values' columns. It gathers keys and values once for its rows.
    """
    own, kv, batch, part = my_block(query_blocks, kv_heads, parts * pieces)
    own = query_blocks - 1 - own  # the queries that see the most keys first
    piece = part % pieces
    part = part // pieces
    q_start, q_len, k_start, k_len, i0 = find_query_block(own, batch, cu, extent, query_block, MASK)
    o_m = part * ROWS + tl.arange(0, ROWS)
    o_i = i0 + o_m // SIDE.per_kv
    o_h = kv * SIDE.per_kv + o_m % SIDE.per_kv
    m_q = (o_m < query_block * SIDE.per_kv) & (o_i < q_len)
    first = i0 + part * ROWS // SIDE.per_kv
    last = tl.minimum(tl.minimum(i0 + (part * ROWS + ROWS - 1) // SIDE.per_kv + 1, i0 + query_block), q_len)
    p_topk = topk + batch.to(tl.int64) * strides_t[0] + own.to(tl.int64) * strides_t[1]
    seen = seen_columns(p_topk, strides_t[2], columns, first, last, q_len, k_len, extent, MASK)
    p_q = row_pointers(q, strides_q, batch, o_h, q_start + o_i)
    p_k = row_pointers(k, strides_k, batch, kv, k_start)
    p_v = row_pointers(v, strides_v, batch, kv, k_start)
    b_q = held(p_q, m_q, strides_q[3], SIDE)
    g0 = piece * VALUE.grad
    m = tl.full([ROWS], NONE, tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = zeros(ROWS, VALUE.grad)
    for c0 in range(0, seen, KEYS):
        o_c = c0 + tl.arange(0, KEYS)
        o_j, m_j = selected_keys(p_topk, strides_t[2], o_c, columns, first, last, q_len, k_len, extent, MASK)
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
    # A row that saw no key has summed pairs that are not allowed; one with a logit of nan has an `l` of nan.
    m_live = (m > NONE) | (l != l)
    acc = tl.where(m_live[:, None], tl.div_rn(acc, tl.broadcast_to(l[:, None], acc.shape)), 0.0)
    o_d = g0 + tl.arange(0, VALUE.grad)
    p_out = (
        row_pointers(out, strides_o, batch, o_h, q_start + o_i)[:, None] + (o_d.to(tl.int64) * strides_o[3])[None, :]
    )
    tl.store(p_out, acc.to(out.dtype.element_ty), mask=m_q[:, None] & (o_d < VALUE.dim)[None, :])
