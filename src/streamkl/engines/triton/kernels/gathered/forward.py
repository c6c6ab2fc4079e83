"""The forward passes over selected keys: a program owns one query and gathers its selected keys, tile by tile."""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.gathered.selected import (
    gathered_logits,
    gathered_target,
    group_row,
    my_query,
    my_selection,
    own_rows,
    seen_columns,
    selected_keys,
)
from streamkl.engines.triton.kernels.groups import LseState, MixtureState, PairedState, RowStatPtrs
from streamkl.engines.triton.kernels.tile.products import activated, held, product, unheld, weight_pointers
from streamkl.engines.triton.kernels.tile.states import (
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
from streamkl.engines.triton.kernels.tile.tiles import row_pointers


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
    """``(m, ln l) [B, H, Nq]`` of one side over the selected keys; a program has one of the parts of a head pack."""
    STATES: tl.constexpr = 1 if SIDE.heads > 0 else ROWS
    work, sequence, query = my_query(counts, counts.parts, support, MASK)
    rows = own_rows(
        work.part, work.head_pack, query, sequence, support.nq, counts.head_packs, GROUP.pack, STATES
    )  # fmt: skip
    first_head = work.head_pack * GROUP.pack
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
    rows = own_rows(work.part, work.head_pack, query, sequence, support.nq, counts.head_packs, GROUP.pack, ROWS)
    first_head = work.head_pack * GROUP.pack
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
    row = own_rows(work.part, work.head_pack, query, sequence, support.nq, counts.head_packs, 1, 1)
    selection = my_selection(topk, work.head_pack, query, sequence)
    seen = seen_columns(selection, sequence, support, MASK)
    token = sequence.q_start + query
    exists = query < sequence.q_len
    first_head_a = work.head_pack * GROUP.size
    first_head_b = work.head_pack * B.heads
    index_a = group_row(work.head_pack, query, sequence, support.nq, counts.head_packs, GROUP)
    q_ptr_a = row_pointers(a.q, sequence.batch, first_head_a, token)
    q_ptr_b = row_pointers(b.q, sequence.batch, first_head_b, token)
    k_ptrs_a = row_pointers(a.k, sequence.batch, work.head_pack * 0, sequence.k_start)
    k_ptrs_b = row_pointers(b.k, sequence.batch, work.head_pack // B.per_kv, sequence.k_start)
    w_ptr = weight_pointers(b, sequence.batch, first_head_b, token, B)
    state = new_mixture(1)
    for first in range(0, seen, KEYS):
        columns = first + tl.arange(0, KEYS)
        keys, exist = selected_keys(selection, columns, sequence, support, MASK)  # [KEYS]
        p = gathered_target(
            q_ptr_a,
            RowStatPtrs(stats_a.m + index_a, stats_a.log2_l + index_a),
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
