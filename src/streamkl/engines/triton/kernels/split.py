"""Split keys: where there are few queries, several programs split the keys of a row, and their states are merged here.

``parts`` is ``[fields, splits, rows]``; a split in which a row saw no key has a row max of ``NONE`` and weight 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.forward import store_mixture, store_paired
from streamkl.engines.triton.kernels.primitives import NONE, exp


@triton.jit
def merge_lse_kernel(parts, out_m, out_ln_l, splits, rows, BLOCK: tl.constexpr):
    """Merges states of `LogSumExp`."""
    o_row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_q = o_row < rows
    step = tl.cast(rows, tl.int64)
    m = tl.full([BLOCK], NONE, tl.float32)
    l = tl.zeros([BLOCK], tl.float32)
    p_part = parts + o_row
    for _ in range(splits):
        m_i = tl.load(p_part, mask=m_q, other=NONE)
        l_i = tl.load(p_part + splits * step, mask=m_q, other=0.0)
        top = tl.maximum(m, m_i, propagate_nan=tl.PropagateNan.ALL)
        l = l * exp(m - top) + l_i * exp(m_i - top)
        m = top
        p_part += step
    m_live = m != NONE
    tl.store(out_m + o_row, tl.where(m_live, m, -float("inf")), mask=m_q)
    tl.store(out_ln_l + o_row, tl.where(m_live, tl.log(l), 0.0), mask=m_q)


@triton.jit
def merge_paired_kernel(
    parts, out_kl, out_mean, out_ma, out_la, out_mb, out_lb, splits, rows, BLOCK: tl.constexpr
):  # fmt: skip
    """Merges states of `PairedState`."""
    o_row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_q = o_row < rows
    step = tl.cast(rows, tl.int64)
    field = splits * step
    m_a = tl.full([BLOCK], NONE, tl.float32)
    m_b = tl.full([BLOCK], NONE, tl.float32)
    l_a = tl.zeros([BLOCK], tl.float32)
    l_b = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK], tl.float32)
    p_part = parts + o_row
    for _ in range(splits):
        m_ai = tl.load(p_part, mask=m_q, other=NONE)
        l_ai = tl.load(p_part + field, mask=m_q, other=0.0)
        m_bi = tl.load(p_part + 2 * field, mask=m_q, other=NONE)
        l_bi = tl.load(p_part + 3 * field, mask=m_q, other=0.0)
        acc_i = tl.load(p_part + 4 * field, mask=m_q, other=0.0)
        top_a = tl.maximum(m_a, m_ai, propagate_nan=tl.PropagateNan.ALL)
        top_b = tl.maximum(m_b, m_bi, propagate_nan=tl.PropagateNan.ALL)
        alpha, alpha_i = exp(m_a - top_a), exp(m_ai - top_a)
        acc = alpha * (acc + l_a * ((m_a - top_a) - (m_b - top_b)))
        acc += alpha_i * (acc_i + l_ai * ((m_ai - top_a) - (m_bi - top_b)))
        l_a = alpha * l_a + alpha_i * l_ai
        l_b = exp(m_b - top_b) * l_b + exp(m_bi - top_b) * l_bi
        m_a, m_b = top_a, top_b
        p_part += step
    store_paired(
        out_kl, out_mean, out_ma, out_la, out_mb, out_lb, o_row, m_q, m_a != NONE, m_a, l_a, m_b, l_b, acc
    )  # fmt: skip


@triton.jit
def merge_mixture_kernel(parts, out_kl, out_mb, out_lb, out_s, splits, rows, BLOCK: tl.constexpr):
    """Merges states of `MixtureState`."""
    o_row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_q = o_row < rows
    step = tl.cast(rows, tl.int64)
    field = splits * step
    m_b = tl.full([BLOCK], NONE, tl.float32)
    l_b = tl.zeros([BLOCK], tl.float32)
    s = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK], tl.float32)
    p_part = parts + o_row
    for _ in range(splits):
        m_i = tl.load(p_part, mask=m_q, other=NONE)
        l_i = tl.load(p_part + field, mask=m_q, other=0.0)
        s_i = tl.load(p_part + 2 * field, mask=m_q, other=0.0)
        acc_i = tl.load(p_part + 3 * field, mask=m_q, other=0.0)
        top = tl.maximum(m_b, m_i, propagate_nan=tl.PropagateNan.ALL)
        acc = acc + tl.where(s != 0, s * (top - m_b), 0.0)
        acc += acc_i + tl.where(s_i != 0, s_i * (top - m_i), 0.0)
        l_b = l_b * exp(m_b - top) + l_i * exp(m_i - top)
        s = s + s_i
        m_b = top
        p_part += step
    store_mixture(out_kl, out_mb, out_lb, out_s, o_row, m_q, m_b != NONE, m_b, l_b, s, acc)
