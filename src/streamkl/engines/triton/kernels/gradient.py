"""A tile of derivatives, from a tile of products: for both backward kernels and the training path."""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.primitives import NONE, SMALLEST, logits, mean_of

BOOST_A = tl.constexpr(64.0)
BOOST_B = tl.constexpr(32768.0)
"""Factors of float16 derivatives before they are rounded: weights are at most 1, ``|Q - p|`` is at most 1."""


@triton.jit
def shifted(b_s, scale, m, m_pair, SIDE: tl.constexpr, MASKED: tl.constexpr):
    """A tile's logits less the row max ``m``, ``NONE`` at pairs that are not allowed.

    ``b_s`` holds products, or, for an indexer, head-summed logits.
    """
    if SIDE.heads == 0:
        b_s = logits(b_s, scale, SIDE)
    b_x = b_s - m[:, None]
    if MASKED:
        b_x = tl.where(m_pair, b_x, NONE)
    return b_x


@triton.jit
def derivative(
    b_d, b_s, scale, w, m_pair, m_live, dtype: tl.constexpr, boost: tl.constexpr, SIDE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The weighted derivative of a side's logits in the dtype of its products, from the unweighted derivative."""
    b_d = b_d * w[:, None]
    m_pair = m_pair & m_live[:, None]
    if SIDE.relu and SIDE.heads == 0:
        m_pair = m_pair & (b_s * scale > 0)
    b_d = tl.where(m_pair, b_d, 0.0)
    if dtype == tl.float16:
        b_d = b_d * boost
    return b_d.to(dtype)


@triton.jit
def head_derivative(b_d, b_y, w, above, peak, dtype: tl.constexpr, SIDE: tl.constexpr):
    """The derivative of an index head's products, from that of the sum ``b_d`` and the head's logits ``b_y``.

    A relu passes it where ``b_y`` is greater than ``above``: 0, or less in a row that is not finite, to keep its nan.
    """
    if SIDE.weighted:
        if dtype == tl.float16:
            w = w * (BOOST_B / peak)
        b_d = b_d * w[:, None]
    elif dtype == tl.float16:
        b_d = b_d * BOOST_B
    if SIDE.relu:
        b_d = tl.where(b_y > above[:, None], b_d, 0.0)
    return b_d.to(dtype)


@triton.jit
def weight_terms(b_d, b_y, m_pair, MASKED: tl.constexpr):
    """The contribution of a tile to the derivative of an index head's weights, ``[rows]``."""
    b_x = b_d * b_y
    if MASKED:
        b_x = tl.where(m_pair, b_x, 0.0)  # 0 times a masked key may be nan
    return tl.sum(b_x, 1)


@triton.jit
def index_peak(peak_w, dtype: tl.constexpr, SIDE: tl.constexpr):
    """The divisor of index weights in float16 derivatives, so that they are at most 1."""
    if SIDE.weighted and dtype == tl.float16:
        return tl.load(peak_w)
    else:
        return 1.0


@triton.jit
def loss_terms(b_p, b_log2_p, b_log2_q, GROUP: tl.constexpr):
    """``(sum p, sum p [log2 p - log2 q])`` of a tile's rows, where ``p`` is the sum of a head group.

    The sum of a tile is part of a divergence, and small: many tiles add up without losing digits. A ``p`` of 0 adds 0,
    unless the logit of ``q`` is not finite.
    """
    if GROUP.size == 1:
        b_log2_p = tl.maximum(b_log2_p, NONE)
    else:
        b_p = mean_of(b_p, GROUP)
        b_log2_p = tl.log2(tl.maximum(b_p, SMALLEST))
    return tl.sum(b_p, 1), tl.sum(b_p * (b_log2_p - b_log2_q), 1)


@triton.jit
def unboosted(factor, peak, dtype: tl.constexpr, boost: tl.constexpr, HALF: tl.constexpr):
    """The final factor of a gradient; if a side is float16, weights were divided by ``peak``."""
    if HALF:
        factor = factor * tl.load(peak)
    if dtype == tl.float16:
        factor = factor / boost
    return factor


@triton.jit
def store_rows(p_out, m_n, b_x, g0, DIM: tl.constexpr, GRAD: tl.constexpr, ATOMIC: tl.constexpr):
    """Stores a finished tile of a gradient, or adds it where several programs contribute."""
    o_d = g0 + tl.arange(0, GRAD)
    p = p_out[:, None] + o_d[None, :]
    mask = m_n[:, None] & (o_d < DIM)[None, :]
    if ATOMIC:
        tl.atomic_add(p, b_x, mask=mask, sem="relaxed")
    else:
        tl.store(p, b_x.to(p_out.dtype.element_ty), mask=mask)
