"""The selected keys of one query, and the rows, sums and logits over them that forward and backward share.

The rows of a tile are the query's heads that read the same key head and the same top-k head, so that a key is gathered
once for all of them. The heads of a head mean, or of an indexer, are reduced to one row, with the state of one row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.groups import Rows, RowStatPtrs, Selection
from streamkl.engines.triton.kernels.tile.products import (
    activated,
    head_weights,
    held,
    log2_probabilities,
    product,
    zeros,
)
from streamkl.engines.triton.kernels.tile.states import IGNORED
from streamkl.engines.triton.kernels.tile.tiles import diagonal_of, find_sequence, my_work, row_pointers, seen_before

COLUMNS = tl.constexpr(1024)
"""How many columns of the top-k indices are read at once, before any key is gathered."""


@triton.jit
def my_query(counts, parts, support, MASK: tl.constexpr):
    """The work of this program, the sequence of its query, and the query's number in it.

    It is one part of the heads of a query's head pack. Queries that see the most keys come first. The query is
    ``q_len`` for a spare program of a packed batch.
    """
    work = my_work(counts.blocks, counts.head_packs, parts)
    sequence, query = find_sequence(counts.blocks - 1 - work.block, work.batch, support, 1, 1, MASK)
    return work, sequence, query


@triton.jit
def own_rows(
    part,
    head_pack,
    query,
    sequence,
    nq,
    head_packs,
    PACK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A part of a head pack's heads in the rows of a tile, as in `packed_rows`."""
    row = part * ROWS + tl.arange(0, ROWS)
    heads = head_pack * PACK + row
    index = (sequence.batch.to(tl.int64) * (head_packs * PACK) + heads) * nq + sequence.q_start + query
    return Rows(query, heads, (row < PACK) & (query < sequence.q_len), index)


@triton.jit
def group_row(head_pack, query, sequence, nq, head_packs, GROUP: tl.constexpr):
    """The place of a head group's first head in the row vectors of side ``a``: `group_index` for one query."""
    group = sequence.batch.to(tl.int64) * head_packs + head_pack
    return group * GROUP.size * nq + sequence.q_start + query


@triton.jit
def my_selection(topk, head, query, sequence):
    """The selected keys of a query, by a head's top-k head."""
    ptr = row_pointers(topk.indices, sequence.batch, head // topk.per_head, sequence.q_start + query)
    return Selection(ptr, topk.indices.stride_dim, topk.columns, query, query + 1)


@triton.jit
def selected_keys(selection, columns, sequence, support, MASK: tl.constexpr):
    """The selected keys in some columns, counted from the first of the sequence, and which of them are seen."""
    keys = tl.load(
        selection.ptr + columns.to(tl.int64) * selection.stride, mask=columns < selection.columns, other=-1
    )  # [KEYS]
    diagonal = diagonal_of(sequence, MASK)
    seen = (keys >= 0) & (keys < sequence.k_len)
    if MASK.right:
        seen &= keys < seen_before(selection.last, diagonal, support, MASK)
    if MASK.left:
        seen &= keys >= selection.first + diagonal - support.left
    return tl.where(seen, keys, 0).to(tl.int64), seen


@triton.jit
def seen_columns(selection, sequence, support, MASK: tl.constexpr):
    """The number of columns up to the last one with a key that a query sees; 0 if there is none."""
    count = selection.first * 0
    for first in range(0, tl.where(selection.first < sequence.q_len, selection.columns, 0), COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        _, seen = selected_keys(selection, columns, sequence, support, MASK)
        count = tl.maximum(count, tl.max(tl.where(seen, columns + 1, 0), 0))
    return count


@triton.jit
def row_sum(x, exist, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """The sum over the heads in the rows of a tile, ``[1, KEYS]``; a row without a head adds 0."""
    if HEADS % ROWS != 0:
        x = tl.where(exist[:, None], x, 0.0)
    return tl.sum(x, 0)[None, :]


@triton.jit
def weighted_sum(x, w, exist, ROWS: tl.constexpr, SIDE: tl.constexpr):
    """The sum of the logits of the heads, each times its weight, ``[1, KEYS]``."""
    if SIDE.weighted:
        x = x * w[:, None]
    return row_sum(x, exist, SIDE.heads, ROWS)


@triton.jit
def gathered_target(
    q_ptr,
    stats,
    exists,
    k,
    side,
    first_head,
    nq,
    ROWS: tl.constexpr,
    SIDE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """`target` for one query, if it ``exists``, ``[1, KEYS]``.

    ``q_ptr`` and ``stats`` are those of the group's first head, ``k`` of key head 0.
    """
    p = gathered_run_sum(q_ptr, stats, exists, k, side, first_head, nq, ROWS, SIDE, GROUP)  # [1, KEYS]
    for run in range(1, GROUP.runs):
        head = run * GROUP.heads
        heads = head.to(tl.int64)
        stats_run = RowStatPtrs(stats.m + heads * nq, stats.log2_l + heads * nq)
        q_run = q_ptr + heads * side.q.stride_head
        more = gathered_run_sum(q_run, stats_run, exists, k, side, first_head + head, nq, ROWS, SIDE, GROUP)
        p = tl.maximum(p, more, propagate_nan=tl.PropagateNan.ALL)
    return tl.where(k.exist[None, :], p, 0.0)


@triton.jit
def gathered_run_sum(
    q_ptr,
    stats,
    exists,
    k,
    side,
    first_head,
    nq,
    ROWS: tl.constexpr,
    SIDE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The sum of the probabilities of a run, ``[1, KEYS]``; each key head is gathered once for all its heads."""
    p = zeros(1, k.ptrs.shape[0])  # [1, KEYS]
    for n in range(GROUP.kv):
        kv = (first_head + n * GROUP.each) // SIDE.per_kv
        k_head = held(k.ptrs + kv.to(tl.int64) * side.k.stride_head, k.exist, side.k, SIDE, True)  # [KEYS, BLOCK]
        for first in range(0, GROUP.each, ROWS):
            row = first + tl.arange(0, ROWS)
            exist = (row < GROUP.each) & exists
            heads = (n * GROUP.each + row).to(tl.int64)
            q = held(q_ptr + heads * side.q.stride_head, exist, side.q, SIDE, True)  # [ROWS, BLOCK]
            products = product(q, k_head, side.dim, SIDE, True)  # [ROWS, KEYS]
            m = tl.load(stats.m + heads * nq, mask=exist, other=0.0)  # [ROWS]
            log2_l = tl.load(stats.log2_l + heads * nq, mask=exist, other=IGNORED)  # [ROWS]
            head_p = tl.exp2(log2_probabilities(activated(products, side.scale, SIDE) - m[:, None], log2_l))
            p += row_sum(head_p, exist, GROUP.each, ROWS)
    return p


@triton.jit
def gathered_logits(
    q_ptr,
    w_ptr,
    exists,
    k,
    side,
    ROWS: tl.constexpr,
    SIDE: tl.constexpr,
):
    """The logits of a head-summed side, ``[1, KEYS]``: `head_summed_logits` for one query, if it ``exists``."""
    x = zeros(1, k.ptrs.shape[0])  # [1, KEYS]
    for first in range(0, SIDE.heads, ROWS):
        row = first + tl.arange(0, ROWS)
        exist = (row < SIDE.heads) & exists
        q = held(q_ptr + row.to(tl.int64) * side.q.stride_head, exist, side.q, SIDE, True)  # [ROWS, BLOCK]
        products = product(q, k, side.dim, SIDE, True)  # [ROWS, KEYS]
        w = 0
        if SIDE.weighted:
            w = head_weights(w_ptr + row.to(tl.int64) * side.w.stride_head, exist)  # [ROWS]
        x += weighted_sum(activated(products, side.scale, SIDE), w, exist, ROWS, SIDE)
    return x
