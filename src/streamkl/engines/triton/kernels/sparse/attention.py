"""Sparse attention: a softmax over the selected keys of a query block, and the values at them."""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.gathered.selected import seen_columns, selected_keys
from streamkl.engines.triton.kernels.groups import Selection, SequenceRange
from streamkl.engines.triton.kernels.tile.products import activated, dot_add, held, load_tile, product, unheld, zeros
from streamkl.engines.triton.kernels.tile.states import NONE, exp
from streamkl.engines.triton.kernels.tile.tiles import allowed_pairs, my_work, packed_sequence, row_pointers


@triton.jit
def find_query_block(block, batch, query_block, support, MASK: tl.constexpr):
    """The sequence of a query block, and the block's first query in it.

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
        return sequence, (block - tl.load(support.packed.query_block_ptr + low)) * query_block
    else:
        return SequenceRange(batch, batch * 0, support.nq, batch * 0, support.nk), block * query_block


@triton.jit
def sparse_attention_kernel(
    side,
    v,
    topk,
    support,
    out,
    counts,
    SIDE: tl.constexpr,
    VALUE: tl.constexpr,
    MASK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SHARED: tl.constexpr,
):
    """``out [B, H, Nq, Dv]`` over ``topk [B, query_blocks, columns]``, which a query block shares.

    Row ``m`` of a query block and key head is query ``m // per_kv`` of query head ``m % per_kv``: a program has one of
    the parts of the rows, and one of the pieces of the values' columns. It gathers keys and values once for its rows.
    """
    work = my_work(counts.query_blocks, counts.kv_heads, counts.parts * counts.pieces)
    block = counts.query_blocks - 1 - work.block  # the queries that see the most keys first
    kv = work.head_pack
    piece = work.part % counts.pieces
    part = work.part // counts.pieces
    sequence, first_query = find_query_block(block, work.batch, counts.query_block, support, MASK)
    row = part * ROWS + tl.arange(0, ROWS)
    queries = first_query + row // SIDE.per_kv  # [ROWS]
    heads = kv * SIDE.per_kv + row % SIDE.per_kv  # [ROWS]
    exist = (row < counts.query_block * SIDE.per_kv) & (queries < sequence.q_len)
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
    seen = seen_columns(selection, sequence, support, MASK)
    q_ptrs = row_pointers(side.q, work.batch, heads, sequence.q_start + queries)
    k_ptrs = row_pointers(side.k, work.batch, kv, sequence.k_start)
    v_ptrs = row_pointers(v, work.batch, kv, sequence.k_start)
    q = held(q_ptrs, exist, side.q, SIDE, True)  # [ROWS, BLOCK]
    first_column = piece * VALUE.grad
    m = tl.full([ROWS], NONE, tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = zeros(ROWS, VALUE.grad)  # [ROWS, GRAD]
    for first in range(0, seen, KEYS):
        columns = first + tl.arange(0, KEYS)
        keys, key_seen = selected_keys(selection, columns, sequence, support, MASK)  # [KEYS]
        k = held(k_ptrs + keys * side.k.stride_token, key_seen, side.k, SIDE, True)  # [KEYS, BLOCK]
        products = product(q, k, side.dim, SIDE, True)  # [ROWS, KEYS]
        allowed = key_seen[None, :]
        if SHARED:
            allowed = allowed & allowed_pairs(queries, keys.to(tl.int32), sequence, support, MASK)
        x = tl.where(allowed, activated(products, side.scale, SIDE), NONE)
        new_m = tl.maximum(m, tl.max(x, 1))
        alpha = exp(m - new_m)
        weights = exp(x - new_m[:, None])  # [ROWS, KEYS]
        l = l * alpha + tl.sum(weights, 1)
        values = unheld(v_ptrs + keys * v.stride_token, key_seen, v)
        value_tile = load_tile(values, first_column, VALUE.dim, VALUE.grad, True)  # [KEYS, GRAD]
        acc = dot_add(weights.to(v.ptr.dtype.element_ty), value_tile, acc * alpha[:, None], VALUE.upcast)
        m = new_m
    # A row that saw no key has summed pairs that are not allowed; one with a logit of nan has an `l` of nan.
    live = (m > NONE) | (l != l)
    acc = tl.where(live[:, None], tl.div_rn(acc, tl.broadcast_to(l[:, None], acc.shape)), 0.0)
    columns = first_column + tl.arange(0, VALUE.grad)
    out_ptrs = row_pointers(out, work.batch, heads, sequence.q_start + queries)
    tl.store(
        out_ptrs[:, None] + (columns.to(tl.int64) * out.stride_dim)[None, :],
        acc.to(out.ptr.dtype.element_ty),
        mask=exist[:, None] & (columns < VALUE.dim)[None, :],
    )
