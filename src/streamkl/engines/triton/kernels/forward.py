"""The forward passes: a program owns a block of packed rows and carries their state over the tiles of keys."""

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
    log_of_ratio,
    logits,
    masked_tile,
    mean_of,
    my_block,
    packed_rows,
    row_pointers,
    sees_a_key,
    target,
    update_mixture,
    update_paired,
)


@triton.jit
def _product(
    b_q, p_q, m_q, strides_q, p_k, m_k, strides_k, dim,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SIDE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """``q @ k^T`` of a tile, with the queries held in ``b_q`` unless they are too wide."""
    if SIDE.chunked:
        return chunked_product(p_q, m_q, strides_q[3], p_k, m_k, strides_k[3], dim, ROWS, KEYS, SIDE, MASKED)
    else:
        b_k = load_tile(p_k, m_k, strides_k[3], 0, SIDE.dim, SIDE.block, MASKED)
        return dot(b_q, tl.trans(b_k), SIDE.upcast)


@triton.jit
def _paired_pass(
    m_a, l_a, m_b, l_b, acc, b_qa, b_qb, p_qa, p_qb, p_ka, p_kb, strides_qa, strides_ka, strides_qb, strides_kb,
    o_i, m_q, q_len, k_len, extent, scale_a, scale_b, tiles,
    ROWS: tl.constexpr, KEYS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, MASK: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Carries the state over the full tiles, or over the masked ones."""
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
        p_j = p_ka + o_j.to(tl.int64) * strides_ka[2]
        b_a = _product(b_qa, p_qa, m_q, strides_qa, p_j, m_j, strides_ka, extent[4], ROWS, KEYS, A, MASKED)
        p_j = p_kb + o_j.to(tl.int64) * strides_kb[2]
        b_b = _product(b_qb, p_qb, m_q, strides_qb, p_j, m_j, strides_kb, extent[5], ROWS, KEYS, B, MASKED)
        b_a = logits(b_a, scale_a, A)
        b_b = logits(b_b, scale_b, B)
        if MASKED:
            m_pair = allowed_pairs(o_i, o_j, q_len, k_len, extent, MASK)
            b_a = tl.where(m_pair, b_a, NONE)
            b_b = tl.where(m_pair, b_b, NONE)
        m_a, l_a, m_b, l_b, acc = update_paired(m_a, l_a, m_b, l_b, acc, b_a, b_b)
    return m_a, l_a, m_b, l_b, acc


@triton.jit
def store_paired(
    out_kl, out_mean, out_ma, out_la, out_mb, out_lb, o_row, m_q, m_live, m_a, l_a, m_b, l_b, acc
):  # fmt: skip
    """Finishes a state: divergence, mean and row stats of each row; 0 and ``-inf`` for a dead row."""
    mean = tl.div_rn(acc, l_a)
    kl = mean + log_of_ratio(l_b, l_a)
    kl = tl.where((m_a + m_b) == (m_a + m_b), kl, float("nan"))
    tl.store(out_kl + o_row, tl.where(m_live, kl, 0.0), mask=m_q)
    tl.store(out_mean + o_row, tl.where(m_live, mean, 0.0), mask=m_q)
    tl.store(out_ma + o_row, tl.where(m_live, m_a, -float("inf")), mask=m_q)
    tl.store(out_la + o_row, tl.where(m_live, tl.log(l_a), 0.0), mask=m_q)
    tl.store(out_mb + o_row, tl.where(m_live, m_b, -float("inf")), mask=m_q)
    tl.store(out_lb + o_row, tl.where(m_live, tl.log(l_b), 0.0), mask=m_q)


@triton.jit
def paired_kernel(
    q_a, k_a, q_b, k_b, strides_qa, strides_ka, strides_qb, strides_kb, cu, extent, scale_a, scale_b,
    out_kl, out_mean, out_ma, out_la, out_mb, out_lb, parts, blocks, head_groups, splits, rows,
    A: tl.constexpr, B: tl.constexpr, GROUP: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The divergence head by head, ``[B, R, Nq]``, its mean and its row stats: `PairedState` in registers."""
    block, head_group, batch, split = my_block(blocks, head_groups, splits)
    block = blocks - 1 - block  # the rows that see the most keys first
    batch, q_start, q_len, k_start, k_len, block = find_sequence(block, batch, cu, extent, 0, GROUP.pack, ROWS, MASK)
    o_i, o_h, m_q, o_row = packed_rows(
        block, head_group, batch, q_start, q_len, extent[0], head_groups, GROUP.pack, ROWS
    )
    p_qa = row_pointers(q_a, strides_qa, batch, o_h, q_start + o_i)
    p_qb = row_pointers(q_b, strides_qb, batch, o_h, q_start + o_i)
    p_ka = row_pointers(k_a, strides_ka, batch, head_group * GROUP.pack // A.per_kv, k_start)
    p_kb = row_pointers(k_b, strides_kb, batch, head_group * GROUP.pack // B.per_kv, k_start)
    b_qa, b_qb = 0, 0
    if not A.chunked:
        b_qa = load_tile(p_qa, m_q, strides_qa[3], 0, A.dim, A.block, True)
    if not B.chunked:
        b_qb = load_tile(p_qb, m_q, strides_qb[3], 0, B.dim, B.block, True)

    i0 = block * ROWS // GROUP.pack
    i1 = tl.minimum((block * ROWS + ROWS - 1) // GROUP.pack + 1, q_len)
    tiles = key_tiles(i0, i1, q_len, k_len, extent, split, splits, KEYS, MASK)
    m_a = tl.full([ROWS], NONE, tl.float32)
    m_b = tl.full([ROWS], NONE, tl.float32)
    l_a = tl.zeros([ROWS], tl.float32)
    l_b = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS], tl.float32)
    m_a, l_a, m_b, l_b, acc = _paired_pass(
        m_a, l_a, m_b, l_b, acc, b_qa, b_qb, p_qa, p_qb, p_ka, p_kb, strides_qa, strides_ka, strides_qb, strides_kb,
        o_i, m_q, q_len, k_len, extent, scale_a, scale_b, tiles, ROWS, KEYS, A, B, MASK, False,
    )  # fmt: skip
    m_a, l_a, m_b, l_b, acc = _paired_pass(
        m_a, l_a, m_b, l_b, acc, b_qa, b_qb, p_qa, p_qb, p_ka, p_kb, strides_qa, strides_ka, strides_qb, strides_kb,
        o_i, m_q, q_len, k_len, extent, scale_a, scale_b, tiles, ROWS, KEYS, A, B, MASK, True,
    )  # fmt: skip
    m_live = sees_a_key(o_i, q_len, k_len, extent, tiles[0] * KEYS, tiles[1] * KEYS, MASK)
    m_a = checked_maximum(m_a, m_live)
    m_b = checked_maximum(m_b, m_live)
    if SPLIT:
        p_part = parts + split.to(tl.int64) * rows + o_row
        step = splits.to(tl.int64) * rows
        tl.store(p_part, m_a, mask=m_q)
        tl.store(p_part + step, l_a, mask=m_q)
        tl.store(p_part + 2 * step, m_b, mask=m_q)
        tl.store(p_part + 3 * step, l_b, mask=m_q)
        tl.store(p_part + 4 * step, acc, mask=m_q)
    else:
        store_paired(
            out_kl, out_mean, out_ma, out_la, out_mb, out_lb, o_row, m_q, m_live, m_a, l_a, m_b, l_b, acc
        )  # fmt: skip


@triton.jit
def _mixture_pass(
    m_b, l_b, s, acc, b_qb, p_qa, p_qb, p_wb, p_ma, p_la, p_ka, p_kb, strides_qa, strides_ka, strides_qb, strides_kb,
    stride_wh, first_head, o_i, m_q, q_len, k_len, extent, scale_a, scale_b, tiles,
    ROWS: tl.constexpr, KEYS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, GROUP: tl.constexpr,
    MASK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Carries the state over the full tiles, or over the masked ones."""
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
        p_j = p_ka + o_j.to(tl.int64) * strides_ka[2]
        b_p = target(
            p_qa, p_ma, p_la, m_q, strides_qa[1], strides_qa[3], extent[0], extent[4], p_j, m_j, strides_ka[1],
            strides_ka[3], first_head, scale_a, m_pair, ROWS, KEYS, A, GROUP, MASKED,
        )  # fmt: skip
        p_j = p_kb + o_j.to(tl.int64) * strides_kb[2]
        if B.heads > 0:
            b_kb = 0
            if not B.chunked:
                b_kb = load_tile(p_j, m_j, strides_kb[3], 0, B.dim, B.block, MASKED)
            b_b = head_summed_logits(
                p_qb, m_q, strides_qb[1], strides_qb[3], p_wb, stride_wh, b_kb, p_j, m_j, strides_kb[3], extent[5],
                scale_b, ROWS, KEYS, B, MASKED,
            )  # fmt: skip
        else:
            b_b = _product(b_qb, p_qb, m_q, strides_qb, p_j, m_j, strides_kb, extent[5], ROWS, KEYS, B, MASKED)
            b_b = logits(b_b, scale_b, B)
        if MASKED:
            b_b = tl.where(m_pair, b_b, NONE)
        m_b, l_b, s, acc = update_mixture(m_b, l_b, s, acc, mean_of(b_p, GROUP), b_b)
    return m_b, l_b, s, acc


@triton.jit
def store_mixture(out_kl, out_mb, out_lb, out_s, o_row, m_q, m_live, m_b, l_b, s, acc):
    """Finishes a state: divergence, row stats and mass of each row; 0 and ``-inf`` for a dead row."""
    kl = tl.where(s != 0, tl.div_rn(acc, s) + log_of_ratio(l_b, s), acc)
    kl = tl.where(m_b == m_b, kl, float("nan"))
    tl.store(out_kl + o_row, tl.where(m_live, kl, 0.0), mask=m_q)
    tl.store(out_mb + o_row, tl.where(m_live, m_b, -float("inf")), mask=m_q)
    tl.store(out_lb + o_row, tl.where(m_live, tl.log(l_b), 0.0), mask=m_q)
    tl.store(out_s + o_row, tl.where(m_live, s, 0.0), mask=m_q)


@triton.jit
def mixture_kernel(
    q_a, k_a, q_b, k_b, w_b, strides_qa, strides_ka, strides_qb, strides_kb, strides_wb, m_a, l_a, cu, extent,
    scale_a, scale_b, out_kl, out_mb, out_lb, out_s, parts, blocks, head_groups, splits, rows,
    A: tl.constexpr, B: tl.constexpr, GROUP: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The divergence from a head mean, with ``m_a, log2 l_a [B, H, Nq]`` known: `MixtureState` in registers."""
    block, head_group, batch, split = my_block(blocks, head_groups, splits)
    block = blocks - 1 - block  # the rows that see the most keys first
    batch, q_start, q_len, k_start, k_len, block = find_sequence(block, batch, cu, extent, 0, GROUP.pack, ROWS, MASK)
    o_i, o_h, m_q, o_row = packed_rows(
        block, head_group, batch, q_start, q_len, extent[0], head_groups, GROUP.pack, ROWS
    )
    o_row_a = (batch.to(tl.int64) * (head_groups * GROUP.pack) + o_h) * GROUP.size * extent[0] + q_start + o_i
    p_qa = row_pointers(q_a, strides_qa, batch, o_h * GROUP.size, q_start + o_i)
    p_qb = row_pointers(q_b, strides_qb, batch, o_h, q_start + o_i)
    p_ka = row_pointers(k_a, strides_ka, batch, head_group * 0, k_start)
    p_kb = row_pointers(k_b, strides_kb, batch, head_group * GROUP.pack // B.per_kv, k_start)
    first_head = head_group * GROUP.pack * GROUP.size
    b_qb, p_wb, stride_wh = 0, 0, 0
    if B.weighted:
        p_wb = row_pointers(w_b, strides_wb, batch, o_h, q_start + o_i)
        stride_wh = strides_wb[1]
    if B.heads == 0 and not B.chunked:
        b_qb = load_tile(p_qb, m_q, strides_qb[3], 0, B.dim, B.block, True)

    i0 = block * ROWS // GROUP.pack
    i1 = tl.minimum((block * ROWS + ROWS - 1) // GROUP.pack + 1, q_len)
    tiles = key_tiles(i0, i1, q_len, k_len, extent, split, splits, KEYS, MASK)
    m_b = tl.full([ROWS], NONE, tl.float32)
    l_b = tl.zeros([ROWS], tl.float32)
    s = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS], tl.float32)
    m_b, l_b, s, acc = _mixture_pass(
        m_b, l_b, s, acc, b_qb, p_qa, p_qb, p_wb, m_a + o_row_a, l_a + o_row_a, p_ka, p_kb, strides_qa, strides_ka,
        strides_qb, strides_kb, stride_wh, first_head, o_i, m_q, q_len, k_len, extent, scale_a, scale_b, tiles,
        ROWS, KEYS, A, B, GROUP, MASK, False,
    )  # fmt: skip
    m_b, l_b, s, acc = _mixture_pass(
        m_b, l_b, s, acc, b_qb, p_qa, p_qb, p_wb, m_a + o_row_a, l_a + o_row_a, p_ka, p_kb, strides_qa, strides_ka,
        strides_qb, strides_kb, stride_wh, first_head, o_i, m_q, q_len, k_len, extent, scale_a, scale_b, tiles,
        ROWS, KEYS, A, B, GROUP, MASK, True,
    )  # fmt: skip
    m_live = sees_a_key(o_i, q_len, k_len, extent, tiles[0] * KEYS, tiles[1] * KEYS, MASK)
    m_b = checked_maximum(m_b, m_live)
    if SPLIT:
        p_part = parts + split.to(tl.int64) * rows + o_row
        step = splits.to(tl.int64) * rows
        tl.store(p_part, m_b, mask=m_q)
        tl.store(p_part + step, l_b, mask=m_q)
        tl.store(p_part + 2 * step, s, mask=m_q)
        tl.store(p_part + 3 * step, acc, mask=m_q)
    else:
        store_mixture(out_kl, out_mb, out_lb, out_s, o_row, m_q, m_live, m_b, l_b, s, acc)
