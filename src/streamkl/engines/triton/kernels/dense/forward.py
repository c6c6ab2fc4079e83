"""The forward passes: a program owns a block of packed rows and carries their state over the tiles of keys."""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.groups import MixtureState, PairedState, RowStatPtrs
from streamkl.engines.triton.kernels.tile.products import (
    activated,
    held,
    logits,
    product,
    scores,
    target,
    unheld,
    weight_pointers,
)
from streamkl.engines.triton.kernels.tile.states import (
    NONE,
    checked_maximum,
    mean_of,
    new_mixture,
    new_paired,
    store_mixture,
    store_paired,
    store_part,
    update_mixture,
    update_paired,
)
from streamkl.engines.triton.kernels.tile.tiles import (
    allowed_pairs,
    group_index,
    key_tiles,
    my_rows,
    my_work,
    nth_tile,
    row_pointers,
    sees_a_key,
    tile_count,
)


@triton.jit
def _paired_pass(
    state,
    q_a,
    q_b,
    k_ptrs_a,
    k_ptrs_b,
    queries,
    sequence,
    tiles,
    a,
    b,
    support,
    KEYS: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    MASK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Carries the state over the full tiles, or over the masked ones."""
    count = tile_count(tiles, MASKED)
    for n in range(count):
        keys = nth_tile(n, tiles, MASKED) * KEYS + tl.arange(0, KEYS)  # [KEYS]
        exist = keys < sequence.k_len
        k_a = held(k_ptrs_a + keys.to(tl.int64) * a.k.stride_token, exist, a.k, A, MASKED)
        products_a = product(q_a, k_a, a.dim, A, MASKED)  # [ROWS, KEYS]
        k_b = held(k_ptrs_b + keys.to(tl.int64) * b.k.stride_token, exist, b.k, B, MASKED)
        products_b = product(q_b, k_b, b.dim, B, MASKED)  # [ROWS, KEYS]
        x_a = activated(products_a, a.scale, A)
        x_b = activated(products_b, b.scale, B)
        if MASKED:
            allowed = allowed_pairs(queries, keys, sequence, support, MASK)
            x_a = tl.where(allowed, x_a, NONE)
            x_b = tl.where(allowed, x_b, NONE)
        state = update_paired(state, x_a, x_b)
    return state


@triton.jit
def paired_kernel(
    a,
    b,
    support,
    out,
    parts,
    counts,
    A: tl.constexpr,
    B: tl.constexpr,
    GROUP: tl.constexpr,
    MASK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The divergence head by head, ``[B, R, Nq]``, its mean and its row stats: `PairedState` in registers."""
    work = my_work(counts.blocks, counts.head_packs, counts.splits)
    sequence, block, rows = my_rows(work, support, counts, GROUP.pack, ROWS, MASK)
    tokens = sequence.q_start + rows.queries  # [ROWS]
    first_head = work.head_pack * GROUP.pack
    q_ptrs_a = row_pointers(a.q, sequence.batch, rows.heads, tokens)
    q_ptrs_b = row_pointers(b.q, sequence.batch, rows.heads, tokens)
    k_ptrs_a = row_pointers(a.k, sequence.batch, first_head // A.per_kv, sequence.k_start)
    k_ptrs_b = row_pointers(b.k, sequence.batch, first_head // B.per_kv, sequence.k_start)
    q_a = held(q_ptrs_a, rows.exist, a.q, A, True)
    q_b = held(q_ptrs_b, rows.exist, b.q, B, True)

    tiles = key_tiles(block, sequence, support, work.part, counts.splits, GROUP.pack, ROWS, KEYS, MASK)
    state = new_paired(ROWS)
    for masked in tl.static_range(2):
        state = _paired_pass(
            state, q_a, q_b, k_ptrs_a, k_ptrs_b, rows.queries, sequence, tiles, a, b, support, KEYS, A, B, MASK, masked
        )
    live = sees_a_key(rows.queries, sequence, support, tiles, KEYS, MASK)
    m_a = checked_maximum(state.m_a, live)
    m_b = checked_maximum(state.m_b, live)
    state = PairedState(m_a, state.l_a, m_b, state.l_b, state.acc)
    if parts is not None:
        store_part(parts, work.part, rows, state, 5)
    else:
        store_paired(out, rows.index, rows.exist, live, state)


@triton.jit
def _mixture_pass(
    state,
    q_a,
    stats_a,
    q_b,
    w_ptrs,
    k_ptrs_a,
    k_ptrs_b,
    queries,
    first_head,
    sequence,
    tiles,
    a,
    b,
    support,
    KEYS: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    GROUP: tl.constexpr,
    MASK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Carries the state over the full tiles, or over the masked ones."""
    count = tile_count(tiles, MASKED)
    for n in range(count):
        keys = nth_tile(n, tiles, MASKED) * KEYS + tl.arange(0, KEYS)  # [KEYS]
        exist = keys < sequence.k_len
        allowed = exist[None, :]
        if MASKED:
            allowed = allowed_pairs(queries, keys, sequence, support, MASK)  # [ROWS, KEYS]
        k_a = unheld(k_ptrs_a + keys.to(tl.int64) * a.k.stride_token, exist, a.k)
        p = target(q_a, stats_a, k_a, a, first_head, support.nq, allowed, A, GROUP, MASKED)  # [ROWS, KEYS]
        k_b = held(k_ptrs_b + keys.to(tl.int64) * b.k.stride_token, exist, b.k, B, MASKED)
        x_b = logits(scores(q_b, w_ptrs, k_b, b, B, MASKED), b.scale, B)  # [ROWS, KEYS]
        if MASKED:
            x_b = tl.where(allowed, x_b, NONE)
        state = update_mixture(state, mean_of(p, GROUP), x_b)
    return state


@triton.jit
def mixture_kernel(
    a,
    b,
    stats_a,
    support,
    out,
    parts,
    counts,
    A: tl.constexpr,
    B: tl.constexpr,
    GROUP: tl.constexpr,
    MASK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The divergence from a head mean, with ``m_a, log2 l_a [B, H, Nq]`` known: `MixtureState` in registers."""
    work = my_work(counts.blocks, counts.head_packs, counts.splits)
    sequence, block, rows = my_rows(work, support, counts, GROUP.pack, ROWS, MASK)
    tokens = sequence.q_start + rows.queries  # [ROWS]
    index_a = group_index(rows, sequence, support.nq, counts.head_packs, GROUP)
    q_ptrs_a = row_pointers(a.q, sequence.batch, rows.heads * GROUP.size, tokens)
    q_ptrs_b = row_pointers(b.q, sequence.batch, rows.heads, tokens)
    k_ptrs_a = row_pointers(a.k, sequence.batch, work.head_pack * 0, sequence.k_start)
    k_ptrs_b = row_pointers(b.k, sequence.batch, work.head_pack * GROUP.pack // B.per_kv, sequence.k_start)
    w_ptrs = weight_pointers(b, sequence.batch, rows.heads, tokens, B)
    q_a = unheld(q_ptrs_a, rows.exist, a.q)
    if B.heads > 0:
        q_b = unheld(q_ptrs_b, rows.exist, b.q)
    else:
        q_b = held(q_ptrs_b, rows.exist, b.q, B, True)

    tiles = key_tiles(block, sequence, support, work.part, counts.splits, GROUP.pack, ROWS, KEYS, MASK)
    state = new_mixture(ROWS)
    for masked in tl.static_range(2):
        state = _mixture_pass(
            state, q_a, RowStatPtrs(stats_a.m + index_a, stats_a.log2_l + index_a), q_b, w_ptrs, k_ptrs_a, k_ptrs_b,
            rows.queries, work.head_pack * GROUP.pack * GROUP.size, sequence, tiles, a, b, support, KEYS, A, B, GROUP,
            MASK, masked,
        )  # fmt: skip
    live = sees_a_key(rows.queries, sequence, support, tiles, KEYS, MASK)
    state = MixtureState(checked_maximum(state.m_b, live), state.l_b, state.s, state.acc)
    if parts is not None:
        store_part(parts, work.part, rows, state, 4)
    else:
        store_mixture(out, rows.index, rows.exist, live, state)
