"""A tile of derivatives, from a tile of products: for all gradient kernels and the training path."""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.groups import Factors, RowValues, TileA, TileB
from streamkl.engines.triton.kernels.tile.products import (
    log2_probabilities,
    logits,
    product,
    rounded,
    scores,
    target,
)
from streamkl.engines.triton.kernels.tile.states import IGNORED, NONE, SMALLEST, mean_of

BOOST_A = tl.constexpr(64.0)
BOOST_B = tl.constexpr(32768.0)
"""Factors of float16 derivatives before they are rounded: weights are at most 1, ``|Q - p|`` is at most 1."""


@triton.jit
def load_rows(stats, rows, WANT: tl.constexpr, HEADWISE: tl.constexpr, MASKED: tl.constexpr):
    """The row vectors of a tile's rows, ``[ROWS]``; side ``a`` head by head, ``mean`` where it wants it.

    Ignored rows may hold anything, and are not live.
    """
    if MASKED:
        log2_l_b = tl.load(stats.b.log2_l + rows.index, mask=rows.exist, other=IGNORED)
        m_b = tl.load(stats.b.m + rows.index, mask=rows.exist, other=0.0)
        weight = tl.load(stats.weight + rows.index, mask=rows.exist, other=0.0)
    else:
        log2_l_b = tl.load(stats.b.log2_l + rows.index)
        m_b = tl.load(stats.b.m + rows.index)
        weight = tl.load(stats.weight + rows.index)
    live = rows.exist & ~(log2_l_b >= IGNORED)
    m_a, log2_l_a, mean = m_b, log2_l_b, weight  # not read
    if HEADWISE:
        m_a = tl.load(stats.a.m + rows.index, mask=live, other=0.0)
        log2_l_a = tl.load(stats.a.log2_l + rows.index, mask=live, other=IGNORED)
    if WANT.a:
        mean = tl.load(stats.mean + rows.index, mask=live, other=0.0)
    return RowValues(m_a, log2_l_a, m_b, log2_l_b, weight, mean, live)


@triton.jit
def finite_rows(live, m, WANTED: tl.constexpr):
    """The live rows whose query is read, ``[ROWS]``.

    Where gradients are wanted, a row that is not finite has a row max of nan, and so derivatives of nan; its query is
    not read, so that nan reaches only the keys that it sees.
    """
    if WANTED:
        live = live & (tl.abs(m) < float("inf"))
    return live


@triton.jit
def shifted(score, m, allowed, scale, SIDE: tl.constexpr, MASKED: tl.constexpr):
    """The logits of a tile of `scores` less the row max, ``[ROWS, KEYS]``; ``NONE`` at pairs that are not allowed."""
    x = logits(score, scale, SIDE) - m[:, None]
    if MASKED:
        x = tl.where(allowed, x, NONE)
    return x


@triton.jit
def tile_of_a(
    q,
    k,
    stats,
    values,
    allowed,
    first_head,
    nq,
    side,
    SIDE: tl.constexpr,
    GROUP: tl.constexpr,
    RAGGED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Side ``a`` in a tile: one head, or the target of a head group, of which ``stats`` are those of the first head.

    Held keys may end within the tile if it is ``RAGGED``.
    """
    if GROUP.size == 1:
        products = product(q, k, side.dim, SIDE, RAGGED)  # [ROWS, KEYS]
        x = shifted(products, values.m_a, allowed, side.scale, SIDE, MASKED)
        log2_p = log2_probabilities(x, values.log2_l_a)
        return TileA(products, x, log2_p, tl.exp2(log2_p))
    else:
        p = target(q, stats, k, side, first_head, nq, allowed, SIDE, GROUP, MASKED)  # [ROWS, KEYS]
        return TileA(p, p, p, p)


@triton.jit
def tile_of_b(
    q,
    w_ptrs,
    k,
    values,
    allowed,
    side,
    SIDE: tl.constexpr,
    RAGGED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Side ``b`` in a tile: one head, or an indexer."""
    score = scores(q, w_ptrs, k, side, SIDE, RAGGED)  # [ROWS, KEYS]
    x = shifted(score, values.m_b, allowed, side.scale, SIDE, MASKED)
    return TileB(score, x, log2_probabilities(x, values.log2_l_b))


@triton.jit
def derivative(
    d,
    score,
    weight,
    live,
    allowed,
    scale,
    dtype: tl.constexpr,
    BOOST: tl.constexpr,
    SIDE: tl.constexpr,
):
    """The weighted derivative of a side's logits in the dtype of its products, from the unweighted derivative."""
    d = d * weight[:, None]
    passes = allowed & live[:, None]
    if SIDE.relu and SIDE.heads == 0:
        passes = passes & (score * scale > 0)
    d = tl.where(passes, d, 0.0)
    if dtype == tl.float16:
        d = d * BOOST
    return rounded(d, dtype, SIDE.upcast)


@triton.jit
def derivative_a(tile_a, tile_b, values, allowed, side, SIDE: tl.constexpr):
    """The derivative ``p (a - b - mean)`` of the logits of ``a``, ``[ROWS, KEYS]``."""
    d = tile_a.p * (tile_a.shifted - tile_b.shifted - values.mean[:, None])
    return derivative(
        d, tile_a.products, values.weight, values.live, allowed, side.scale, side.q.ptr.dtype.element_ty, BOOST_A, SIDE
    )


@triton.jit
def derivative_b(tile_a, tile_b, values, allowed, side, SIDE: tl.constexpr, GROUP: tl.constexpr):
    """The derivative ``q - p`` of the logits of ``b``, ``[ROWS, KEYS]``; of an indexer's sum it is in float32."""
    d = tl.exp2(tile_b.log2_q) * GROUP.heads - tile_a.p
    dtype: tl.constexpr = tl.float32 if SIDE.heads > 0 else side.q.ptr.dtype.element_ty
    weight = values.weight * (1.0 / GROUP.heads)
    return derivative(d, tile_b.scores, weight, values.live, allowed, side.scale, dtype, BOOST_B, SIDE)


@triton.jit
def relu_threshold(m_b):
    """What an index head's logits must exceed for a relu to pass a derivative, ``[ROWS]``.

    It is 0, or less in a row that is not finite, to keep its nan.
    """
    return tl.where(tl.abs(m_b) < float("inf"), 0.0, -1.0)


@triton.jit
def head_derivative(
    d,
    head_x,
    w,
    threshold,
    index_divisor,
    dtype: tl.constexpr,
    SIDE: tl.constexpr,
):
    """The derivative of an index head's products, from that of the sum ``d`` and the head's logits ``head_x``."""
    if SIDE.weighted:
        if dtype == tl.float16:
            w = w * (BOOST_B / index_divisor)
        d = d * w[:, None]
    elif dtype == tl.float16:
        d = d * BOOST_B
    if SIDE.relu:
        d = tl.where(head_x > threshold[:, None], d, 0.0)
    return rounded(d, dtype, SIDE.upcast)


@triton.jit
def weight_terms(d, head_x, allowed, MASKED: tl.constexpr):
    """The contribution of a tile to the derivative of an index head's weights, ``[ROWS]``."""
    terms = d * head_x
    if MASKED:
        terms = tl.where(allowed, terms, 0.0)  # 0 times a masked key may be nan
    return tl.sum(terms, 1)


@triton.jit
def loss_terms(p, log2_p, log2_q, GROUP: tl.constexpr):
    """``(sum p, sum p [log2 p - log2 q])`` of a tile's rows, ``[ROWS]``, where ``p`` is the sum of a run.

    The sum of a tile is part of a divergence, and small: many tiles add up without losing digits. A ``p`` of 0 adds 0,
    unless the logit of ``q`` is not finite.
    """
    if GROUP.size == 1:
        log2_p = tl.maximum(log2_p, NONE)
    else:
        p = mean_of(p, GROUP)
        log2_p = tl.log2(tl.maximum(p, SMALLEST))
    return tl.sum(p, 1), tl.sum(p * (log2_p - log2_q), 1)


@triton.jit
def index_weight_divisor(index_divisor, dtype: tl.constexpr, SIDE: tl.constexpr):
    """The divisor of index weights in float16 derivatives, so that they are at most 1."""
    if SIDE.weighted and dtype == tl.float16:
        return tl.load(index_divisor)
    else:
        return 1.0


@triton.jit
def gradient_factor(
    factor,
    weight_divisor,
    dtype: tl.constexpr,
    BOOST: tl.constexpr,
    HALF: tl.constexpr,
):
    """What a sum is multiplied by to become a gradient: a factor, without the boost and divisor of float16."""
    if HALF:
        factor = factor * tl.load(weight_divisor)
    if dtype == tl.float16:
        factor = factor / BOOST
    return factor


@triton.jit
def gradient_factors(a, b, stats, B: tl.constexpr, WANT: tl.constexpr):
    """The final factors of all gradients."""
    dtype_a: tl.constexpr = a.q.ptr.dtype.element_ty
    dtype_b: tl.constexpr = b.q.ptr.dtype.element_ty
    factor_a = gradient_factor(a.scale, stats.weight_divisor, dtype_a, BOOST_A, WANT.half)
    factor_b = gradient_factor(b.scale, stats.weight_divisor, dtype_b, BOOST_B, WANT.half)
    factor_w = gradient_factor(1.0, stats.weight_divisor, tl.float32, BOOST_B, WANT.half)
    index_divisor = index_weight_divisor(stats.index_divisor, dtype_b, B)
    return Factors(factor_a, factor_b * index_divisor, factor_w, index_divisor)


@triton.jit
def store_rows(
    ptrs,
    exist,
    x,
    first,
    SIDE: tl.constexpr,
    ATOMIC: tl.constexpr,
):
    """Stores a finished tile of a gradient, ``[N, GRAD]``, or adds it where several programs contribute."""
    columns = first + tl.arange(0, SIDE.grad)
    tile_ptrs = ptrs[:, None] + columns[None, :]
    mask = exist[:, None] & (columns < SIDE.dim)[None, :]
    if ATOMIC:
        tl.atomic_add(tile_ptrs, x, mask=mask, sem="relaxed")
    else:
        tl.store(tile_ptrs, rounded(x, ptrs.dtype.element_ty, SIDE.upcast), mask=mask)
