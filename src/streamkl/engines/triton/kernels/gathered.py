"""The passes over selected keys: a program owns one query and gathers its selected keys, tile by tile.

The rows of a tile are the query's heads that read the same key head and the same top-k head, so that a key is gathered
once for all of them. The heads of a head mean, or of an indexer, are reduced to one row, with the state of one row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.groups import (
    LseState,
    MixtureState,
    PairedState,
    Rows,
    RowStatPtrs,
    Selection,
)
from streamkl.engines.triton.kernels.products import (
    activated,
    head_weights,
    held,
    log2_probabilities,
    product,
    unheld,
    weight_pointers,
    zeros,
)
from streamkl.engines.triton.kernels.states import (
    IGNORED,
    NONE,
    checked_maximum,
    mean_of,
    new_lse,
    new_mixture,
    new_paired,
    store_lse,
    store_mixture,
    store_paired,
    update_lse,
    update_mixture,
    update_paired,
)
from streamkl.engines.triton.kernels.tiles import find_sequence, my_work, row_pointers

COLUMNS = tl.constexpr(1024)
"""How many columns of the top-k indices are read at once, before any key is gathered."""


@triton.jit
def my_query(counts, parts, support, MASK: tl.constexpr):
    """The work of this program, the sequence of its query, and the query's number in it.

    It is one part of the heads of a query's head group. Queries that see the most keys come first. The query is
    ``q_len`` for a spare program of a packed batch.
    """
    work = my_work(counts.blocks, counts.head_groups, parts)
    sequence, query = find_sequence(counts.blocks - 1 - work.block, work.batch, support, 1, 1, MASK)
    return work, sequence, query


@triton.jit
def own_rows(
    part,
    head_group,
    query,
    sequence,
    nq,
    head_groups,
    PACK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A part of a head group's heads in the rows of a tile, as in `packed_rows`."""
    row = part * ROWS + tl.arange(0, ROWS)
    heads = head_group * PACK + row
    index = (sequence.batch.to(tl.int64) * (head_groups * PACK) + heads) * nq + sequence.q_start + query
    return Rows(query, heads, (row < PACK) & (query < sequence.q_len), index)


@triton.jit
def group_row(head_group, query, sequence, nq, head_groups, GROUP: tl.constexpr):
    """The place of a head group's first head in the row vectors of side ``a``: `group_index` for one query."""
    group = sequence.batch.to(tl.int64) * head_groups + head_group
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
    diagonal = sequence.k_len - sequence.q_len
    seen = (keys >= 0) & (keys < sequence.k_len)
    if MASK.right:
        seen &= keys < selection.last + diagonal + support.right
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
    """The sum of the probabilities of a head group, ``[1, KEYS]``: `target` for one query, if it ``exists``.

    ``q_ptr`` and ``stats`` are those of the group's first head, ``k`` of key head 0; each key head is gathered once for
    all heads that read it.
    """
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
            log2_l = tl.load(stats.l + heads * nq, mask=exist, other=IGNORED)  # [ROWS]
            head_p = tl.exp2(log2_probabilities(activated(products, side.scale, SIDE) - m[:, None], log2_l))
            p += row_sum(head_p, exist, GROUP.each, ROWS)
    return tl.where(k.exist[None, :], p, 0.0)


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


@triton.jit
def gathered_lse_kernel(
    side,
    topk,
    support,
    out,
    counts,
    SIDE: tl.constexpr,
    GROUP: tl.constexpr,
    MASK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """``(m, ln l) [B, H, Nq]`` of one side over the selected keys; a program has one of the parts of a head group."""
    STATES: tl.constexpr = 1 if SIDE.heads > 0 else ROWS
    work, sequence, query = my_query(counts, counts.parts, support, MASK)
    rows = own_rows(
        work.part, work.head_group, query, sequence, support.nq, counts.head_groups, GROUP.pack, STATES
    )  # fmt: skip
    first_head = work.head_group * GROUP.pack
    selection = my_selection(topk, first_head, query, sequence)
    seen = seen_columns(selection, sequence, support, MASK)
    token = sequence.q_start + query
    k_ptrs = row_pointers(side.k, sequence.batch, first_head // SIDE.per_kv, sequence.k_start)
    q_ptrs = row_pointers(side.q, sequence.batch, rows.heads, token)
    w_ptrs = weight_pointers(side, sequence.batch, rows.heads, token, SIDE)
    if SIDE.heads > 0:
        q = unheld(q_ptrs, rows.exist, side.q)
    else:
        q = held(q_ptrs, rows.exist, side.q, SIDE, True)
    state = new_lse(STATES)
    for first in range(0, seen, KEYS):
        columns = first + tl.arange(0, KEYS)
        keys, exist = selected_keys(selection, columns, sequence, support, MASK)  # [KEYS]
        k = held(k_ptrs + keys * side.k.stride_token, exist, side.k, SIDE, True)
        if SIDE.heads > 0:
            x = gathered_logits(q_ptrs, w_ptrs, rows.exist, k, side, ROWS, SIDE)  # [1, KEYS]
        else:
            x = activated(product(q, k, side.dim, SIDE, True), side.scale, SIDE)  # [ROWS, KEYS]
        state = update_lse(state, tl.where(exist[None, :], x, NONE))
    live = rows.exist & (seen > 0)
    store_lse(out, rows.index, rows.exist, live, LseState(checked_maximum(state.m, live), state.l))


@triton.jit
def gathered_paired_kernel(
    a,
    b,
    topk,
    support,
    out,
    counts,
    A: tl.constexpr,
    B: tl.constexpr,
    GROUP: tl.constexpr,
    MASK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The divergence head by head, its mean and its row stats over selected keys: `PairedState` in registers."""
    work, sequence, query = my_query(counts, counts.parts, support, MASK)
    rows = own_rows(work.part, work.head_group, query, sequence, support.nq, counts.head_groups, GROUP.pack, ROWS)
    first_head = work.head_group * GROUP.pack
    selection = my_selection(topk, first_head, query, sequence)
    seen = seen_columns(selection, sequence, support, MASK)
    token = sequence.q_start + query
    k_ptrs_a = row_pointers(a.k, sequence.batch, first_head // A.per_kv, sequence.k_start)
    k_ptrs_b = row_pointers(b.k, sequence.batch, first_head // B.per_kv, sequence.k_start)
    q_ptrs_a = row_pointers(a.q, sequence.batch, rows.heads, token)
    q_ptrs_b = row_pointers(b.q, sequence.batch, rows.heads, token)
    q_a = held(q_ptrs_a, rows.exist, a.q, A, True)  # [ROWS, BLOCK]
    q_b = held(q_ptrs_b, rows.exist, b.q, B, True)  # [ROWS, BLOCK]
    state = new_paired(ROWS)
    for first in range(0, seen, KEYS):
        columns = first + tl.arange(0, KEYS)
        keys, exist = selected_keys(selection, columns, sequence, support, MASK)  # [KEYS]
        k_a = held(k_ptrs_a + keys * a.k.stride_token, exist, a.k, A, True)  # [KEYS, BLOCK]
        k_b = held(k_ptrs_b + keys * b.k.stride_token, exist, b.k, B, True)  # [KEYS, BLOCK]
        products_a = product(q_a, k_a, a.dim, A, True)  # [ROWS, KEYS]
        products_b = product(q_b, k_b, b.dim, B, True)  # [ROWS, KEYS]
        x_a = tl.where(exist[None, :], activated(products_a, a.scale, A), NONE)
        x_b = tl.where(exist[None, :], activated(products_b, b.scale, B), NONE)
        state = update_paired(state, x_a, x_b)
    live = rows.exist & (seen > 0)
    m_a = checked_maximum(state.m_a, live)
    m_b = checked_maximum(state.m_b, live)
    store_paired(
        out, rows.index, rows.exist, live, PairedState(m_a, state.l_a, m_b, state.l_b, state.acc)
    )  # fmt: skip


@triton.jit
def gathered_mixture_kernel(
    a,
    b,
    stats_a,
    topk,
    support,
    out,
    counts,
    A: tl.constexpr,
    B: tl.constexpr,
    GROUP: tl.constexpr,
    MASK: tl.constexpr,
    ROWS: tl.constexpr,
    TARGET_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The divergence from a head mean over selected keys, with ``m_a, log2 l_a [B, H, Nq]`` known.

    The distribution of a program has ``B.heads`` heads: one, or those of an indexer.
    """
    work, sequence, query = my_query(counts, counts.parts, support, MASK)
    row = own_rows(work.part, work.head_group, query, sequence, support.nq, counts.head_groups, 1, 1)
    selection = my_selection(topk, work.head_group, query, sequence)
    seen = seen_columns(selection, sequence, support, MASK)
    token = sequence.q_start + query
    exists = query < sequence.q_len
    first_head_a = work.head_group * GROUP.size
    first_head_b = work.head_group * B.heads
    index_a = group_row(work.head_group, query, sequence, support.nq, counts.head_groups, GROUP)
    q_ptr_a = row_pointers(a.q, sequence.batch, first_head_a, token)
    q_ptr_b = row_pointers(b.q, sequence.batch, first_head_b, token)
    k_ptrs_a = row_pointers(a.k, sequence.batch, work.head_group * 0, sequence.k_start)
    k_ptrs_b = row_pointers(b.k, sequence.batch, work.head_group // B.per_kv, sequence.k_start)
    w_ptr = weight_pointers(b, sequence.batch, first_head_b, token, B)
    state = new_mixture(1)
    for first in range(0, seen, KEYS):
        columns = first + tl.arange(0, KEYS)
        keys, exist = selected_keys(selection, columns, sequence, support, MASK)  # [KEYS]
        p = gathered_target(
            q_ptr_a,
            RowStatPtrs(stats_a.m + index_a, stats_a.l + index_a),
            exists,
            unheld(k_ptrs_a + keys * a.k.stride_token, exist, a.k),
            a,
            first_head_a,
            support.nq,
            TARGET_ROWS,
            A,
            GROUP,
        )  # [1, KEYS]
        k_b = held(k_ptrs_b + keys * b.k.stride_token, exist, b.k, B, True)  # [KEYS, BLOCK]
        x_b = gathered_logits(q_ptr_b, w_ptr, exists, k_b, b, ROWS, B)  # [1, KEYS]
        state = update_mixture(state, mean_of(p, GROUP), tl.where(exist[None, :], x_b, NONE))
    live = row.exist & (seen > 0)
    state = MixtureState(checked_maximum(state.m_b, live), state.l_b, state.s, state.acc)
    store_mixture(out, row.index, row.exist, live, state)
