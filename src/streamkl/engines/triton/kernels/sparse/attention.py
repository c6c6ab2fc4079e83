"""Sparse attention: a softmax over the selected keys of a query block, and the values at them."""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.gathered.selected import seen_columns, selected_keys
from streamkl.engines.triton.kernels.groups import Rows, Selection, SequenceRange, Work
from streamkl.engines.triton.kernels.tile.products import (
    activated,
    dot_add,
    held,
    load_tile,
    product,
    rounded,
    unheld,
    zeros,
)
from streamkl.engines.triton.kernels.tile.states import NONE, exp
from streamkl.engines.triton.kernels.tile.tiles import allowed_pairs, my_work, packed_sequence, row_pointers


@triton.jit
def find_query_block(block, batch, query_block, support, MASK: tl.constexpr):
    """The sequence of a query block, the sequence's number, and the block's first query in it.

    Blocks past the last packed sequence begin past its queries.
    """
    if MASK.packed:
        low = 0
        high = support.packed.count - 1
        for _ in range(support.packed.steps):
            middle = (low + high + 1) // 2
            start = tl.load(support.packed.query_block_ptr + middle)
            high = tl.where(start <= block, high, middle - 1)
            low = tl.where(start <= block, middle, low)
        sequence = packed_sequence(low, batch, support.packed)
        return sequence, low, (block - tl.load(support.packed.query_block_ptr + low)) * query_block
    else:
        return SequenceRange(batch, batch * 0, support.nq, batch * 0, support.nk), batch, block * query_block


@triton.jit
def my_query_block(topk, support, counts, SIDE: tl.constexpr, MASK: tl.constexpr, ROWS: tl.constexpr):
    """The work of this program, the sequence of its query block and its number, its rows and their selected keys.

    Row ``m`` of a query block and key head is query ``m // per_kv`` of query head ``m % per_kv``: a program has one of
    the parts of the rows, and one of the pieces of the columns, which is the ``part`` of the work.
    """
    work = my_work(counts.query_blocks, counts.kv_heads, counts.parts * counts.pieces)
    block = counts.query_blocks - 1 - work.block  # the queries that see the most keys first
    part = work.part // counts.pieces
    sequence, number, first_query = find_query_block(block, work.batch, counts.query_block, support, MASK)
    row = part * ROWS + tl.arange(0, ROWS)
    queries = first_query + row // SIDE.per_kv  # [ROWS]
    heads = work.head_pack * SIDE.per_kv + row % SIDE.per_kv  # [ROWS]
    exist = (row < counts.query_block * SIDE.per_kv) & (queries < sequence.q_len)
    index = work.batch.to(tl.int64) * (counts.kv_heads * SIDE.per_kv) + heads
    rows = Rows(queries, heads, exist, index * support.nq + sequence.q_start + queries)
    last = tl.minimum(first_query + (part * ROWS + ROWS - 1) // SIDE.per_kv + 1, first_query + counts.query_block)
    selection = Selection(
        topk.indices.ptr
        + work.batch.to(tl.int64) * topk.indices.stride_batch
        + block.to(tl.int64) * topk.indices.stride_token,
        topk.indices.stride_dim,
        topk.columns,
        first_query + part * ROWS // SIDE.per_kv,
        tl.minimum(last, sequence.q_len),
    )
    return Work(work.block, work.head_pack, work.batch, work.part % counts.pieces), sequence, number, rows, selection


@triton.jit
def key_pointers(x, batch, head, sequence, number, keys, pages):
    """Pointers to keys of a sequence, ``[KEYS]``: they lie one after another, or in pages."""
    if pages is None:
        return row_pointers(x, batch, head, sequence.k_start) + keys * x.stride_token
    else:
        page = tl.load(pages.ptr + number.to(tl.int64) * pages.stride + keys // pages.size)  # [KEYS]
        return row_pointers(x, page, head, keys % pages.size)


@triton.jit
def store_columns(to, batch, rows, sequence, x, first, VALUE: tl.constexpr):
    """Stores columns of rows, ``[ROWS, GRAD]``, from a first one on."""
    columns = first + tl.arange(0, VALUE.grad)
    ptrs = row_pointers(to, batch, rows.heads, sequence.q_start + rows.queries)
    tl.store(
        ptrs[:, None] + (columns.to(tl.int64) * to.stride_dim)[None, :],
        rounded(x, to.ptr.dtype.element_ty, VALUE.upcast),
        mask=rows.exist[:, None] & (columns < VALUE.dim)[None, :],
    )


@triton.jit
def sparse_attention_kernel(
    side,
    v,
    topk,
    support,
    pages,
    out,
    counts,
    SIDE: tl.constexpr,
    VALUE: tl.constexpr,
    MASK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SHARED: tl.constexpr,
):
    """``out [B, H, Nq, Dv]`` and its row stats over ``topk [B, query_blocks, columns]``, which a query block shares.

    A program gathers keys and values once for its rows (`my_query_block`), from ``pages`` if there are any.
    """
    work, sequence, number, rows, selection = my_query_block(topk, support, counts, SIDE, MASK, ROWS)
    kv = work.head_pack
    seen = seen_columns(selection, sequence, support, MASK)
    q_ptrs = row_pointers(side.q, work.batch, rows.heads, sequence.q_start + rows.queries)
    q = held(q_ptrs, rows.exist, side.q, SIDE, True)  # [ROWS, BLOCK]
    first_column = work.part * VALUE.grad
    m = tl.full([ROWS], NONE, tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = zeros(ROWS, VALUE.grad)  # [ROWS, GRAD]
    for first in range(0, seen, KEYS):
        columns = first + tl.arange(0, KEYS)
        keys, key_seen = selected_keys(selection, columns, sequence, support, MASK)  # [KEYS]
        k_ptrs = key_pointers(side.k, work.batch, kv, sequence, number, keys, pages)
        k = held(k_ptrs, key_seen, side.k, SIDE, True)  # [KEYS, BLOCK]
        products = product(q, k, side.dim, SIDE, True)  # [ROWS, KEYS]
        allowed = key_seen[None, :]
        if SHARED:
            allowed = allowed & allowed_pairs(rows.queries, keys.to(tl.int32), sequence, support, MASK)
        x = tl.where(allowed, activated(products, side.scale, SIDE), NONE)
        new_m = tl.maximum(m, tl.max(x, 1))
        alpha = exp(m - new_m)
        weights = exp(x - new_m[:, None])  # [ROWS, KEYS]
        l = l * alpha + tl.sum(weights, 1)
        values = unheld(key_pointers(v, work.batch, kv, sequence, number, keys, pages), key_seen, v)
        value_tile = load_tile(values, first_column, VALUE.dim, VALUE.grad, True)  # [KEYS, GRAD]
        weights = rounded(weights, v.ptr.dtype.element_ty, VALUE.upcast)
        acc = dot_add(weights, value_tile, acc * alpha[:, None], VALUE.upcast)
        m = new_m
    # A row that saw no key has summed pairs that are not allowed; one with a logit of nan has an `l` of nan.
    live = (m > NONE) | (l != l)
    acc = tl.where(live[:, None], tl.div_rn(acc, tl.broadcast_to(l[:, None], acc.shape)), 0.0)
    store_columns(out.out, work.batch, rows, sequence, acc, first_column, VALUE)
    if out.rest is not None:
        rest = acc - rounded(acc, out.out.ptr.dtype.element_ty, VALUE.upcast).to(tl.float32)
        store_columns(out.rest, work.batch, rows, sequence, rest, first_column, VALUE)
    stored = rows.exist & (work.part == 0)
    tl.store(out.m + rows.index, tl.where(live, m, -float("inf")), mask=stored)
    tl.store(out.ln_l + rows.index, tl.where(live, tl.log(l), 0.0), mask=stored)
