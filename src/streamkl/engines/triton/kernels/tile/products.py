"""Tokens of a tile, their products, and the logits of a side: of a head, a head-summed side, or a head mean.

Kernels are compiled without contraction (``enable_fp_fusion=False``): ``x * scale - m`` must be 0 where ``m`` is
``x * scale``, or a row with one key would have a divergence. A fused multiply-add is written where it is wanted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.groups import RowStatPtrs, Tokens
from streamkl.engines.triton.kernels.tile.states import LOG2E
from streamkl.engines.triton.kernels.tile.tiles import row_pointers


@triton.jit
def zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """An accumulator, ``[ROWS, COLUMNS]``."""
    return tl.zeros([ROWS, COLUMNS], tl.float32)


@triton.jit
def load_tile(
    tokens,
    first,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    TOTAL: tl.constexpr = 0,
):
    """Columns ``first .. first + BLOCK`` of tokens, ``[N, BLOCK]``; 0 past ``DIM`` and, if masked, where none exist.

    Columns need no mask where ``BLOCK`` (or ``TOTAL``, the width of several such blocks) divides the head dim.
    """
    columns = first + tl.arange(0, BLOCK)
    ptrs = tokens.ptrs[:, None] + (columns.to(tl.int64) * tokens.stride_dim)[None, :]  # [N, BLOCK]
    if DIM % (TOTAL if TOTAL > 0 else BLOCK) == 0:
        if MASKED:
            return tl.load(ptrs, mask=tokens.exist[:, None], other=0.0)
        else:
            return tl.load(ptrs)
    else:
        if MASKED:
            return tl.load(ptrs, mask=tokens.exist[:, None] & (columns < DIM)[None, :], other=0.0)
        else:
            return tl.load(ptrs, mask=(columns < DIM)[None, :], other=0.0)


@triton.jit
def unheld(ptrs, exist, x):
    """Tokens of which no tile is held."""
    return Tokens(ptrs, exist, x.stride_dim, None)


@triton.jit
def held(ptrs, exist, x, SIDE: tl.constexpr, MASKED: tl.constexpr):
    """Tokens with their tile, ``[N, BLOCK]``, unless heads are so wide that `product` reads chunks."""
    tokens = unheld(ptrs, exist, x)
    if SIDE.chunked:
        return tokens
    else:
        return Tokens(ptrs, exist, x.stride_dim, load_tile(tokens, 0, SIDE.dim, SIDE.block, MASKED))


@triton.jit
def gradient_columns(tokens, first, SIDE: tl.constexpr, MASKED: tl.constexpr):
    """The columns of tokens for a gradient, ``[N, GRAD]``: all of them, if they are held, or a piece that is read."""
    if SIDE.chunked:
        return load_tile(tokens, first, SIDE.dim, SIDE.grad, MASKED)
    else:
        return tokens.tile


@triton.jit
def finite(x):
    """``x`` with 0 where it is not finite: a masked pair adds ``0 * k``, which must be 0."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0)


@triton.jit
def dot(x, y, UPCAST: tl.constexpr):
    """``x @ y`` in float32."""
    if UPCAST:
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    return tl.dot(x, y, input_precision="ieee")


@triton.jit
def rounded(x, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """Float32 in a dtype, to the nearest number, as compilers do it; the interpreter drops bits of bfloat16 instead."""
    if UPCAST and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def dot_add(x, y, acc, UPCAST: tl.constexpr):
    """``acc + x @ y`` in float32."""
    if UPCAST:
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    return tl.dot(x, y, acc, input_precision="ieee")


@triton.jit
def product(q, k, dim, SIDE: tl.constexpr, MASKED: tl.constexpr):
    """``q @ k^T`` of a tile, ``[ROWS, KEYS]``; of heads too wide to hold, both are read again, chunk by chunk."""
    if SIDE.chunked:
        acc = zeros(q.ptrs.shape[0], k.ptrs.shape[0])  # [ROWS, KEYS]
        for first in range(0, dim, SIDE.block):
            q_chunk = load_tile(q, first, SIDE.dim, SIDE.block, True)  # [ROWS, BLOCK]
            k_chunk = load_tile(k, first, SIDE.dim, SIDE.block, MASKED)  # [KEYS, BLOCK]
            acc = dot_add(q_chunk, tl.trans(k_chunk), acc, SIDE.upcast)
        return acc
    else:
        return dot(q.tile, tl.trans(k.tile), SIDE.upcast)


@triton.jit
def activated(products, scale, SIDE: tl.constexpr):
    """The logits of a tile of products."""
    x = products * scale
    if SIDE.relu:
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def weight_pointers(side, batch, heads, tokens, SIDE: tl.constexpr):
    """Pointers to the weights of index heads, ``[ROWS]``, if they have any."""
    if SIDE.weighted:
        return row_pointers(side.w, batch, heads, tokens)
    else:
        return 0


@triton.jit
def head_weights(ptrs, exist):
    """The weights of an index head, ``[ROWS]``, in float32."""
    return tl.load(ptrs, mask=exist, other=0.0).to(tl.float32)


@triton.jit
def head_summed_logits(q, w_ptrs, k, side, SIDE: tl.constexpr, MASKED: tl.constexpr):
    """The logits of a head-summed side, ``[ROWS, KEYS]``: the sum over heads, each times its weight in the row.

    ``q`` and ``w_ptrs`` are those of the first head; ``k`` is held for all heads unless it is too wide.
    """
    q_ptrs = q.ptrs
    x = zeros(q.ptrs.shape[0], k.ptrs.shape[0])  # [ROWS, KEYS]
    for _ in range(SIDE.heads):
        products = product(held(q_ptrs, q.exist, side.q, SIDE, True), k, side.dim, SIDE, MASKED)  # [ROWS, KEYS]
        head_x = activated(products, side.scale, SIDE)
        if SIDE.weighted:
            w = head_weights(w_ptrs, q.exist)  # [ROWS]
            x = tl.fma(head_x, tl.broadcast_to(w[:, None], head_x.shape), x)
            w_ptrs += side.w.stride_head
        else:
            x += head_x
        q_ptrs += side.q.stride_head
    return x


@triton.jit
def scores(q, w_ptrs, k, side, SIDE: tl.constexpr, MASKED: tl.constexpr):
    """Products of a tile, or, for an indexer, its head-summed logits, ``[ROWS, KEYS]``."""
    if SIDE.heads > 0:
        return head_summed_logits(q, w_ptrs, k, side, SIDE, MASKED)
    else:
        return product(q, k, side.dim, SIDE, MASKED)


@triton.jit
def logits(score, scale, SIDE: tl.constexpr):
    """The logits of a tile of `scores`."""
    if SIDE.heads > 0:
        return score
    else:
        return activated(score, scale, SIDE)


@triton.jit
def log2_probabilities(x, log2_l):
    """``log2(exp(x) / l)`` of logits less the row max, ``[ROWS, KEYS]``."""
    return tl.fma(x, tl.full(x.shape, LOG2E, tl.float32), tl.broadcast_to(-log2_l[:, None], x.shape))


@triton.jit
def target(
    q,
    stats,
    k,
    side,
    first_head,
    nq,
    allowed,
    SIDE: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The sum of the probabilities of a head group, or the largest of its runs' sums, ``[ROWS, KEYS]``.

    ``q`` and ``stats`` are those of the group's first head, ``k`` of key head 0.
    """
    p = run_sum(q, stats, k, side, first_head, nq, SIDE, GROUP, MASKED)  # [ROWS, KEYS]
    for run in range(1, GROUP.runs):
        head = run * GROUP.heads
        heads = head.to(tl.int64)
        q_run = unheld(q.ptrs + heads * side.q.stride_head, q.exist, side.q)
        stats_run = RowStatPtrs(stats.m + heads * nq, stats.log2_l + heads * nq)
        more = run_sum(q_run, stats_run, k, side, first_head + head, nq, SIDE, GROUP, MASKED)
        p = tl.maximum(p, more, propagate_nan=tl.PropagateNan.ALL)
    if MASKED:
        p = tl.where(allowed, p, 0.0)
    return p


@triton.jit
def run_sum(
    q,
    stats,
    k,
    side,
    first_head,
    nq,
    SIDE: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The sum of the probabilities of a run, ``[ROWS, KEYS]``; each key head is loaded once for all its heads."""
    q_ptrs = q.ptrs
    m_ptrs = stats.m
    l_ptrs = stats.log2_l
    p = zeros(q.ptrs.shape[0], k.ptrs.shape[0])  # [ROWS, KEYS]
    for n in range(GROUP.kv):
        kv = (first_head + n * GROUP.each) // SIDE.per_kv
        k_head = held(k.ptrs + kv.to(tl.int64) * side.k.stride_head, k.exist, side.k, SIDE, MASKED)
        for _ in range(GROUP.each):
            products = product(held(q_ptrs, q.exist, side.q, SIDE, True), k_head, side.dim, SIDE, MASKED)
            m = tl.load(m_ptrs, mask=q.exist, other=0.0)  # [ROWS]
            log2_l = tl.load(l_ptrs, mask=q.exist, other=0.0)  # [ROWS]
            p += tl.exp2(log2_probabilities(activated(products, side.scale, SIDE) - m[:, None], log2_l))
            q_ptrs += side.q.stride_head
            m_ptrs += nq
            l_ptrs += nq
    return p
