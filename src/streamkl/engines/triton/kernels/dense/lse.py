"""The log-sum-exp of one side."""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.groups import LseState
from streamkl.engines.triton.kernels.tile.products import held, logits, scores, unheld, weight_pointers
from streamkl.engines.triton.kernels.tile.states import (
    NONE,
    checked_maximum,
    new_lse,
    store_lse,
    store_part,
    update_lse,
)
from streamkl.engines.triton.kernels.tile.tiles import (
    allowed_pairs,
    key_tiles,
    my_rows,
    my_work,
    nth_tile,
    row_pointers,
    sees_a_key,
    tile_count,
)


@triton.jit
def _lse_pass(
    state,
    q,
    w_ptrs,
    k_ptrs,
    queries,
    sequence,
    tiles,
    side,
    support,
    KEYS: tl.constexpr,
    SIDE: tl.constexpr,
    MASK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Carries the state over the full tiles, or over the masked ones."""
    count = tile_count(tiles, MASKED)
    for n in range(count):
        keys = nth_tile(n, tiles, MASKED) * KEYS + tl.arange(0, KEYS)  # [KEYS]
        k = held(k_ptrs + keys.to(tl.int64) * side.k.stride_token, keys < sequence.k_len, side.k, SIDE, MASKED)
        x = logits(scores(q, w_ptrs, k, side, SIDE, MASKED), side.scale, SIDE)  # [ROWS, KEYS]
        if MASKED:
            x = tl.where(allowed_pairs(queries, keys, sequence, support, MASK), x, NONE)
        state = update_lse(state, x)
    return state


@triton.jit
def lse_kernel(
    side,
    support,
    out,
    parts,
    counts,
    SIDE: tl.constexpr,
    GROUP: tl.constexpr,
    MASK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """``(m, ln l) [B, H, Nq]`` of one side; a program owns a block of packed rows and one of the splits of the keys."""
    work = my_work(counts.blocks, counts.head_packs, counts.splits)
    sequence, block, rows = my_rows(work, support, counts, GROUP.pack, ROWS, MASK)
    tokens = sequence.q_start + rows.queries  # [ROWS]
    q_ptrs = row_pointers(side.q, sequence.batch, rows.heads, tokens)
    k_ptrs = row_pointers(side.k, sequence.batch, work.head_pack * GROUP.pack // SIDE.per_kv, sequence.k_start)
    w_ptrs = weight_pointers(side, sequence.batch, rows.heads, tokens, SIDE)
    if SIDE.heads > 0:
        q = unheld(q_ptrs, rows.exist, side.q)
    else:
        q = held(q_ptrs, rows.exist, side.q, SIDE, True)

    tiles = key_tiles(block, sequence, support, work.part, counts.splits, GROUP.pack, ROWS, KEYS, MASK)
    state = new_lse(ROWS)
    for masked in tl.static_range(2):
        state = _lse_pass(
            state, q, w_ptrs, k_ptrs, rows.queries, sequence, tiles, side, support, KEYS, SIDE, MASK, masked
        )
    live = sees_a_key(rows.queries, sequence, support, tiles, KEYS, MASK)
    state = LseState(checked_maximum(state.m, live), state.l)
    if parts is not None:
        store_part(parts, work.part, rows, state, 2)
    else:
        store_lse(out, rows.index, rows.exist, live, state)
