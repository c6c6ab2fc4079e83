"""The backward of sparse attention, in two passes and without atomics: each gradient has one program that writes it.

A program over queries owns rows of a query block, and their dQ stays in registers. A program over keys owns a block of
keys, and walks the query blocks that select one of them in a fixed order: dK and dV stay in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.gathered.selected import seen_columns, selected_keys
from streamkl.engines.triton.kernels.sparse.attention import my_query_block
from streamkl.engines.triton.kernels.tile.gradient import store_rows
from streamkl.engines.triton.kernels.tile.products import (
    activated,
    dot_add,
    finite,
    gradient_columns,
    held,
    load_tile,
    log2_probabilities,
    product,
    rounded,
    unheld,
    zeros,
)
from streamkl.engines.triton.kernels.tile.states import IGNORED, LOG2E
from streamkl.engines.triton.kernels.tile.tiles import allowed_pairs, find_sequence, my_work, row_pointers


@triton.jit
def delta_rows(batch, rows, tokens, live, value, given, VALUE: tl.constexpr, ROWS: tl.constexpr):
    """The inner product of output and gradient, ``[ROWS]``, and 0, or nan where the gradient is not finite.

    The output is that before rounding: its rest is added.
    """
    d = unheld(row_pointers(value.q, batch, rows.heads, tokens), live, value.q)
    out = unheld(row_pointers(given.out, batch, rows.heads, tokens), live, given.out)
    delta = tl.zeros([ROWS], tl.float32)
    nothing = tl.zeros([ROWS], tl.float32)
    for first in range(0, value.dim, VALUE.block):
        d_chunk = load_tile(d, first, VALUE.dim, VALUE.block, True).to(tl.float32)  # [ROWS, BLOCK]
        chunk = load_tile(out, first, VALUE.dim, VALUE.block, True).to(tl.float32)  # [ROWS, BLOCK]
        if given.rest is not None:
            rest = unheld(row_pointers(given.rest, batch, rows.heads, tokens), live, given.rest)
            chunk += load_tile(rest, first, VALUE.dim, VALUE.block, True).to(tl.float32)
        delta += tl.sum(d_chunk * chunk, 1)
        nothing += tl.sum(d_chunk * 0.0, 1)
    return delta, nothing


@triton.jit
def tile_gradient(q, k, d, v, m, log2_l, delta, allowed, side, value, SIDE: tl.constexpr, VALUE: tl.constexpr):
    """``p`` and the gradient of logits ``p (dp - delta)`` in a tile, ``[ROWS, KEYS]``; 0 where it is not allowed."""
    x = activated(product(q, k, side.dim, SIDE, True), side.scale, SIDE)  # [ROWS, KEYS]
    p = tl.where(allowed, tl.exp2(log2_probabilities(x - m[:, None], log2_l)), 0.0)
    dp = product(d, v, value.dim, VALUE, True)  # [ROWS, KEYS]
    return p, tl.where(allowed, p * (dp - delta[:, None]), 0.0)


@triton.jit
def selected_pairs(
    first,
    selection,
    rows,
    live,
    sequence,
    support,
    MASK: tl.constexpr,
    KEYS: tl.constexpr,
    SHARED: tl.constexpr,
):
    """The keys of columns from ``first`` on, which of them exist, ``[KEYS]``, and which pairs do, ``[ROWS, KEYS]``."""
    columns = first + tl.arange(0, KEYS)
    keys, key_seen = selected_keys(selection, columns, sequence, support, MASK)  # [KEYS]
    allowed = key_seen[None, :] & live[:, None]
    if SHARED:
        allowed = allowed & allowed_pairs(rows.queries, keys.to(tl.int32), sequence, support, MASK)
    return keys, key_seen, allowed


@triton.jit
def attention_queries_kernel(
    side,
    value,
    topk,
    support,
    given,
    rows_out,
    dq_ptr,
    counts,
    SIDE: tl.constexpr,
    VALUE: tl.constexpr,
    MASK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SHARED: tl.constexpr,
):
    """DQ of the rows of a query block, and the row vectors that `attention_keys_kernel` reads.

    ``value`` holds the gradient of the output, as ``q``, and the values, as ``k``.
    """
    work, sequence, _number, rows, selection = my_query_block(topk, support, counts, SIDE, MASK, ROWS)
    kv = work.head_pack
    tokens = sequence.q_start + rows.queries
    m = tl.load(given.m + rows.index, mask=rows.exist, other=-float("inf"))  # [ROWS]
    live = rows.exist & (m != -float("inf"))
    m = tl.where(live, m, 0.0)
    delta, nothing = delta_rows(work.batch, rows, tokens, live, value, given, VALUE, ROWS)
    log2_l = tl.load(given.ln_l + rows.index, mask=live, other=0.0) * LOG2E + nothing
    log2_l = tl.where(live, log2_l, IGNORED)
    q = held(row_pointers(side.q, work.batch, rows.heads, tokens), live, side.q, SIDE, True)  # [ROWS, BLOCK]
    d = held(row_pointers(value.q, work.batch, rows.heads, tokens), live, value.q, VALUE, True)  # [ROWS, BLOCK]
    k_ptrs = row_pointers(side.k, work.batch, kv, sequence.k_start)
    v_ptrs = row_pointers(value.k, work.batch, kv, sequence.k_start)
    first_column = work.part * SIDE.grad
    seen = seen_columns(selection, sequence, support, MASK)
    if value.q.ptr.dtype.element_ty == tl.float32:
        # There delta errs as much as dp, so it is the sum of p dp: their errors cancel where p is close to 1.
        nothing = delta * 0.0
        delta = tl.zeros([ROWS], tl.float32)
        for first in range(0, seen, KEYS):
            keys, exist, allowed = selected_pairs(first, selection, rows, live, sequence, support, MASK, KEYS, SHARED)
            k = held(k_ptrs + keys * side.k.stride_token, exist, side.k, SIDE, True)  # [KEYS, BLOCK]
            v = held(v_ptrs + keys * value.k.stride_token, exist, value.k, VALUE, True)  # [KEYS, BLOCK]
            _, terms = tile_gradient(q, k, d, v, m, log2_l, nothing, allowed, side, value, SIDE, VALUE)
            delta += tl.sum(terms, 1)
    if given.d_lse is not None:  # p (dp - delta) + p d_lse
        delta -= tl.load(given.d_lse + rows.index, mask=live, other=0.0)
    keys_seen = tl.zeros([ROWS], tl.int32)
    dq = zeros(ROWS, SIDE.grad)  # [ROWS, GRAD]
    for first in range(0, seen, KEYS):
        keys, exist, allowed = selected_pairs(first, selection, rows, live, sequence, support, MASK, KEYS, SHARED)
        k = held(k_ptrs + keys * side.k.stride_token, exist, side.k, SIDE, True)  # [KEYS, BLOCK]
        v = held(v_ptrs + keys * value.k.stride_token, exist, value.k, VALUE, True)  # [KEYS, BLOCK]
        _, dx = tile_gradient(q, k, d, v, m, log2_l, delta, allowed, side, value, SIDE, VALUE)
        k_columns = finite(gradient_columns(k, first_column, SIDE, True))  # [KEYS, GRAD]
        dq = dot_add(rounded(dx, k_columns.dtype, SIDE.upcast), k_columns, dq, SIDE.upcast)
        keys_seen += tl.sum(allowed.to(tl.int32), 1)
    several = tl.where(keys_seen == 1, 0.0, 1.0)
    if given.d_lse is not None:
        several = tl.full([ROWS], 1.0, tl.float32)
    dq = dq * (several * side.scale)[:, None]
    store_rows(dq_ptr + rows.index * SIDE.dim, rows.exist, dq, first_column, SIDE, False)
    stored = rows.exist & (work.part == 0)
    tl.store(rows_out.log2_l + rows.index, log2_l, mask=stored)
    tl.store(rows_out.delta + rows.index, delta, mask=stored)
    tl.store(rows_out.several + rows.index, several, mask=stored)


@triton.jit
def attention_keys_kernel(
    side,
    value,
    pairs,
    support,
    m_ptr,
    stats,
    dk_ptr,
    dv_ptr,
    counts,
    SIDE: tl.constexpr,
    VALUE: tl.constexpr,
    MASK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """DK and dV of a block of keys, from the rows of the query blocks that select one of them.

    Rows of several query blocks make a tile: row ``m`` of a query block is query ``m // per_kv`` of query head
    ``m % per_kv``.
    """
    work = my_work(counts.blocks, counts.kv_heads, counts.pieces)
    kv = work.head_pack
    sequence, block = find_sequence(work.block, work.batch, support, 1, KEYS, MASK, True)
    keys = block * KEYS + tl.arange(0, KEYS)  # [KEYS]
    key_exist = keys < sequence.k_len
    k_ptrs = row_pointers(side.k, work.batch, kv, sequence.k_start + keys)
    v_ptrs = row_pointers(value.k, work.batch, kv, sequence.k_start + keys)
    k = held(k_ptrs, key_exist, side.k, SIDE, True)  # [KEYS, BLOCK]
    v = held(v_ptrs, key_exist, value.k, VALUE, True)  # [KEYS, BLOCK]
    # A piece past the last one of a side is the last one again.
    first_k = tl.minimum(work.part, (SIDE.dim - 1) // SIDE.grad) * SIDE.grad
    first_v = tl.minimum(work.part, (VALUE.dim - 1) // VALUE.grad) * VALUE.grad
    at = work.batch.to(tl.int64) * counts.blocks + work.block
    start = tl.load(pairs.start + at)
    per_pair = counts.query_block * SIDE.per_kv
    count = ((tl.load(pairs.start + at + 1) - start) * per_pair).to(tl.int32)
    head_index = work.batch.to(tl.int64) * counts.kv_heads + kv
    dk = zeros(KEYS, SIDE.grad)  # [KEYS, GRAD]
    dv = zeros(KEYS, VALUE.grad)  # [KEYS, GRAD]
    for first in range(0, count, ROWS):
        row = first + tl.arange(0, ROWS)
        pair = start + row // per_pair
        queries = tl.load(pairs.query + pair, mask=row < count, other=0) + row % per_pair // SIDE.per_kv  # [ROWS]
        bits = tl.load(pairs.bits + pair, mask=row < count, other=0)  # [ROWS]
        exist = (row < count) & (queries < sequence.q_len)
        heads = kv * SIDE.per_kv + row % SIDE.per_kv
        tokens = sequence.q_start + queries
        index = (head_index * SIDE.per_kv + row % SIDE.per_kv) * support.nq + tokens
        log2_l = tl.load(stats.log2_l + index, mask=exist, other=IGNORED)  # [ROWS]
        live = exist & ~(log2_l >= IGNORED)
        # Of rows that see no key anything may be read: `allowed` leaves them out.
        m = tl.load(m_ptr + index, mask=exist, other=0.0)  # [ROWS]
        delta = tl.load(stats.delta + index, mask=exist, other=0.0)  # [ROWS]
        several = tl.load(stats.several + index, mask=exist, other=0.0)  # [ROWS]
        q = held(row_pointers(side.q, work.batch, heads, tokens), live, side.q, SIDE, True)  # [ROWS, BLOCK]
        d = held(row_pointers(value.q, work.batch, heads, tokens), live, value.q, VALUE, True)  # [ROWS, BLOCK]
        selected = ((bits[:, None] >> tl.arange(0, KEYS)[None, :]) & 1) != 0  # [ROWS, KEYS]
        allowed = selected & live[:, None] & allowed_pairs(queries, keys, sequence, support, MASK)
        p, dx = tile_gradient(q, k, d, v, m, log2_l, delta, allowed, side, value, SIDE, VALUE)
        q_columns = finite(gradient_columns(q, first_k, SIDE, True))  # [ROWS, GRAD]
        d_columns = finite(gradient_columns(d, first_v, VALUE, True))  # [ROWS, GRAD]
        dk = dot_add(tl.trans(rounded(dx * several[:, None], q_columns.dtype, SIDE.upcast)), q_columns, dk, SIDE.upcast)
        dv = dot_add(tl.trans(rounded(p, d_columns.dtype, VALUE.upcast)), d_columns, dv, VALUE.upcast)
    key_index = head_index * support.nk + sequence.k_start + keys
    store_rows(dk_ptr + key_index * SIDE.dim, key_exist, dk * side.scale, first_k, SIDE, False)
    store_rows(dv_ptr + key_index * VALUE.dim, key_exist, dv, first_v, VALUE, False)
