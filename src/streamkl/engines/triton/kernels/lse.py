"""The log-sum-exp of one side."""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.primitives import (
    NONE,
    allowed_pairs,
    checked_maximum,
    chunked_product,
    dot,
    find_sequence,
    head_summed_logits,
    key_tiles,
    load_tile,
    logits,
    masked_tile,
    my_block,
    packed_rows,
    row_pointers,
    sees_a_key,
    update_lse,
)


@triton.jit
def _lse_pass(
    m, l, b_q, p_q, m_q, stride_qh, stride_qd, p_w, stride_wh, p_k, stride_kn, stride_kd, o_i, q_len, k_len, extent,
    scale, start, end, full_start, full_end,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SIDE: tl.constexpr, MASK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Carries the state over the full tiles, or over the masked ones."""
    count = full_end - full_start
    if MASKED:
        count = end - start - count
    for n in range(count):
        if MASKED:
            t = masked_tile(n, start, full_start, full_end)
        else:
            t = full_start + n
        o_j = t * KEYS + tl.arange(0, KEYS)
        m_j = o_j < k_len
        p_j = p_k + o_j.to(tl.int64) * stride_kn
        b_k = 0
        if not SIDE.chunked:
            b_k = load_tile(p_j, m_j, stride_kd, 0, SIDE.dim, SIDE.block, MASKED)
        if SIDE.heads > 0:
            b_x = head_summed_logits(
                p_q, m_q, stride_qh, stride_qd, p_w, stride_wh, b_k, p_j, m_j, stride_kd, extent[4], scale,
                ROWS, KEYS, SIDE, MASKED,
            )  # fmt: skip
        else:
            if SIDE.chunked:
                b_s = chunked_product(p_q, m_q, stride_qd, p_j, m_j, stride_kd, extent[4], ROWS, KEYS, SIDE, MASKED)
            else:
                b_s = dot(b_q, tl.trans(b_k), SIDE.upcast)
            b_x = logits(b_s, scale, SIDE)
        if MASKED:
            m_pair = allowed_pairs(o_i, o_j, q_len, k_len, extent, MASK)
            b_x = tl.where(m_pair, b_x, NONE)
        m, l = update_lse(m, l, b_x)
    return m, l


@triton.jit
def lse_kernel(
    q, k, w, strides_q, strides_k, strides_w, cu, extent, scale, out_m, out_ln_l, parts, blocks, head_groups,
    splits, rows,
    SIDE: tl.constexpr, GROUP: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """``(m, ln l) [B, H, Nq]`` of one side; a program owns a block of packed rows and one of ``splits`` of the keys."""
    block, head_group, batch, split = my_block(blocks, head_groups, splits)
    block = blocks - 1 - block  # the rows that see the most keys first
    batch, q_start, q_len, k_start, k_len, block = find_sequence(block, batch, cu, extent, 0, GROUP.pack, ROWS, MASK)
    o_i, o_h, m_q, o_row = packed_rows(
        block, head_group, batch, q_start, q_len, extent[0], head_groups, GROUP.pack, ROWS
    )
    p_q = row_pointers(q, strides_q, batch, o_h, q_start + o_i)
    p_k = row_pointers(k, strides_k, batch, head_group * GROUP.pack // SIDE.per_kv, k_start)

    i0 = block * ROWS // GROUP.pack
    i1 = tl.minimum((block * ROWS + ROWS - 1) // GROUP.pack + 1, q_len)
    start, end, full_start, full_end = key_tiles(i0, i1, q_len, k_len, extent, split, splits, KEYS, MASK)
    m = tl.full([ROWS], NONE, tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    b_q, p_w, stride_wh = 0, 0, 0
    if SIDE.weighted:
        p_w = row_pointers(w, strides_w, batch, o_h, q_start + o_i)
        stride_wh = strides_w[1]
    if SIDE.heads == 0 and not SIDE.chunked:
        b_q = load_tile(p_q, m_q, strides_q[3], 0, SIDE.dim, SIDE.block, True)
    m, l = _lse_pass(
        m, l, b_q, p_q, m_q, strides_q[1], strides_q[3], p_w, stride_wh, p_k, strides_k[2], strides_k[3], o_i, q_len,
        k_len, extent, scale, start, end, full_start, full_end, ROWS, KEYS, SIDE, MASK, False,
    )  # fmt: skip
    m, l = _lse_pass(
        m, l, b_q, p_q, m_q, strides_q[1], strides_q[3], p_w, stride_wh, p_k, strides_k[2], strides_k[3], o_i, q_len,
        k_len, extent, scale, start, end, full_start, full_end, ROWS, KEYS, SIDE, MASK, True,
    )  # fmt: skip
    m_live = sees_a_key(o_i, q_len, k_len, extent, start * KEYS, end * KEYS, MASK)
    m = checked_maximum(m, m_live)
    if SPLIT:
        tl.store(parts + split.to(tl.int64) * rows + o_row, m, mask=m_q)
        tl.store(parts + (splits + split).to(tl.int64) * rows + o_row, l, mask=m_q)
    else:
        tl.store(out_m + o_row, tl.where(m_live, m, -float("inf")), mask=m_q)
        tl.store(out_ln_l + o_row, tl.where(m_live, tl.log(l), 0.0), mask=m_q)
