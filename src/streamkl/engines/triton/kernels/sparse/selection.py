"""Selection: an indexer's scores of query blocks, and the best keys of each.

A score and its key are one number, the rank, so that a sort needs no second tensor and equal scores go to the lower
key. Ranks are 64 bits: the score's, in the order of whole numbers, above those of the key, inverted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.groups import SequenceRange
from streamkl.engines.triton.kernels.tile.products import held, logits, scores, unheld, weight_pointers
from streamkl.engines.triton.kernels.tile.tiles import allowed_pairs, key_tiles, packed_sequence, row_pointers

LARGEST = tl.constexpr(3.4028234663852886e38)
"""The highest score of a key that is not on the diagonal of its query block: inf is reserved for those."""
LAST_KEY = tl.constexpr(0x7FFFFFFF)
NO_RANK = tl.constexpr(-(1 << 63))
"""The rank of what is not selected, below that of every key."""
ANY_RANK = tl.constexpr((1 << 63) - 1)


@triton.jit
def find_query_blocks(tile, batch, support, BLOCKS: tl.constexpr, MASK: tl.constexpr):
    """The sequence of a tile of ``BLOCKS`` query blocks, and its first block: in the sequence, in the batch element.

    Sequence ``n`` of a packed batch starts at tile ``first // BLOCKS + n``, which leaves room for its ragged last one.
    """
    if MASK.packed:
        low = 0
        high = support.packed.count - 1
        for _ in range(support.packed.steps):
            middle = (low + high + 1) // 2
            start = tl.load(support.packed.query_block_ptr + middle) // BLOCKS + middle
            high = tl.where(start <= tile, high, middle - 1)
            low = tl.where(start <= tile, middle, low)
        sequence = packed_sequence(low, batch, support.packed)
        first = tl.load(support.packed.query_block_ptr + low)
        block = (tile - (first // BLOCKS + low)) * BLOCKS
        return sequence, block, first + block
    else:
        return SequenceRange(batch, batch * 0, support.nq, batch * 0, support.nk), tile * BLOCKS, tile * BLOCKS


@triton.jit
def highest_scores(x, BLOCKS: tl.constexpr, EACH: tl.constexpr, KEYS: tl.constexpr):
    """The highest score of each run of ``EACH`` rows, ``[BLOCKS, KEYS]``."""
    if EACH == 1:
        return x
    elif BLOCKS == 1:
        return tl.max(x, 0)[None, :]
    else:
        return tl.max(tl.reshape(x, [BLOCKS, EACH, KEYS]), 1)


@triton.jit
def block_scores_kernel(
    side,
    lse,
    support,
    scores_ptr,
    row_ptr,
    counts,
    SIDE: tl.constexpr,
    MASK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    EACH: tl.constexpr,
):
    """Scores of some keys for tiles of query blocks, a row for each block; ``-inf`` for what is no candidate.

    A program owns a tile of query blocks, of ``EACH`` rows at a time, and a tile of keys. A score is the highest of the
    block's rows, less their ``lse [B, 1, Nq]`` if it is given. ``row_ptr`` says which query block a row of scores
    belongs to, counted over the batch; -1 for none.
    """
    BLOCKS: tl.constexpr = ROWS // EACH
    part = tl.program_id(0) % counts.key_tiles
    own = tl.program_id(0) // counts.key_tiles
    batch = (counts.first_tile + own) // counts.tiles
    head = batch * 0
    sequence, block, number = find_query_blocks((counts.first_tile + own) % counts.tiles, batch, support, BLOCKS, MASK)
    key_tile = counts.first_key_tile + part
    keys = key_tile * KEYS + tl.arange(0, KEYS)  # [KEYS]
    tiles = key_tiles(block // BLOCKS, sequence, support, 0, 1, 1, BLOCKS * QUERY_BLOCK, KEYS, MASK)
    highest = tl.full([BLOCKS, KEYS], -float("inf"), tl.float32)
    if (key_tile >= tiles.start) & (key_tile < tiles.end):
        k_ptrs = row_pointers(side.k, batch, head, sequence.k_start + keys)
        k = held(k_ptrs, keys < sequence.k_len, side.k, SIDE, True)  # [KEYS, BLOCK]
        for first in range(0, QUERY_BLOCK, EACH):
            row = tl.arange(0, ROWS)
            inside = first + row % EACH
            queries = (block + row // EACH) * QUERY_BLOCK + inside  # [ROWS]
            exist = (inside < QUERY_BLOCK) & (queries < sequence.q_len)
            tokens = sequence.q_start + queries
            q_ptrs = row_pointers(side.q, batch, head, tokens)
            w_ptrs = weight_pointers(side, batch, head, tokens, SIDE)
            if SIDE.heads > 0:
                q = unheld(q_ptrs, exist, side.q)
            else:
                q = held(q_ptrs, exist, side.q, SIDE, True)
            x = logits(scores(q, w_ptrs, k, side, SIDE, True), side.scale, SIDE)  # [ROWS, KEYS]
            if lse is not None:
                x -= tl.load(lse + batch.to(tl.int64) * support.nq + tokens, mask=exist, other=0.0)[:, None]
            allowed = allowed_pairs(queries, keys, sequence, support, MASK) & exist[:, None]
            x = tl.where(allowed & (x == x), x, -float("inf"))
            highest = tl.maximum(highest, highest_scores(x, BLOCKS, EACH, KEYS))
    blocks = block + tl.arange(0, BLOCKS)
    if QUERY_BLOCK > 1:
        on = blocks * QUERY_BLOCK + sequence.k_len - sequence.q_len  # the key on the diagonal of the first row
        diagonal = (keys[None, :] >= on[:, None]) & (keys[None, :] < (on + QUERY_BLOCK)[:, None])
        diagonal &= keys[None, :] < sequence.k_len
        highest = tl.where(diagonal, float("inf"), tl.minimum(highest, LARGEST))
    rows = own.to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)  # of scores
    tl.store(scores_ptr + (rows * counts.stride + part * KEYS)[:, None] + tl.arange(0, KEYS)[None, :], highest)
    place = batch.to(tl.int64) * counts.query_blocks + number + tl.arange(0, BLOCKS)
    tl.store(row_ptr + rows, tl.where(blocks * QUERY_BLOCK < sequence.q_len, place, -1), mask=part == 0)


@triton.jit
def ranks(x, keys):
    """The ranks of scores and keys, ``[ROWS, KEYS]``: a higher score, or of equal scores a lower key, ranks higher."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # 0 and -0 are equal
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return tl.where(x > -float("inf"), (ordered << 32) | (keys ^ LAST_KEY).to(tl.int64)[None, :], NO_RANK)


@triton.jit
def best_keys_kernel(
    scores_ptr,
    row_ptr,
    best_ptr,
    bound_ptr,
    out_ptr,
    counts,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TOPK: tl.constexpr,
):
    """The best keys of rows of scores, best first, in ``TOPK`` columns of row ``row_ptr [rows]`` of the result.

    Where keys come in several calls, the best ranks so far, ``[rows, TOPK]`` by rising rank, are read from and written
    to ``best_ptr``, and only the last call has an output. Where a row has more columns than ``TOPK``, the ranks of
    later ones lie below ``bound_ptr [rows]``, that of the last column before them.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    to = tl.load(row_ptr + rows, mask=rows < counts.rows, other=-1)  # [ROWS]
    exist = to >= 0
    places = tl.arange(0, TOPK)
    best = tl.full([ROWS, TOPK], NO_RANK, tl.int64)
    if best_ptr is not None:
        best_ptrs = best_ptr + (rows * TOPK)[:, None] + places[None, :]  # [ROWS, TOPK]
        best = tl.load(best_ptrs, mask=exist[:, None] & (counts.first_key > 0), other=NO_RANK)
    bound = tl.full([ROWS], ANY_RANK, tl.int64)
    if bound_ptr is not None:
        bound = tl.load(bound_ptr + rows, mask=exist & (counts.first_column > 0), other=ANY_RANK)
    for first in range(0, counts.columns, KEYS):
        columns = first + tl.arange(0, KEYS)
        x = tl.load(
            scores_ptr + (rows * counts.stride)[:, None] + columns[None, :],
            mask=exist[:, None] & (columns < counts.columns)[None, :],
            other=-float("inf"),
        )  # [ROWS, KEYS]
        rank = ranks(x, counts.first_key + columns)
        rank = tl.where(rank < bound[:, None], rank, NO_RANK)
        lowest = tl.min(best, 1)  # [ROWS]
        if tl.max(tl.max((rank > lowest[:, None]).to(tl.int32), 1), 0) > 0:
            # One rises and the other falls: their maximum is bitonic, and has the highest of both.
            best = tl.bitonic_merge(tl.maximum(best, tl.topk(rank, TOPK)))
    if out_ptr is None:
        tl.store(best_ptrs, best, mask=exist[:, None])
    else:
        columns = counts.first_column + TOPK - 1 - places
        keys = tl.where(best == NO_RANK, -1, (best & LAST_KEY) ^ LAST_KEY).to(tl.int32)
        tl.store(
            out_ptr + (to * counts.topk)[:, None] + columns[None, :],
            keys,
            mask=exist[:, None] & (columns < counts.topk)[None, :],
        )
        if bound_ptr is not None:
            tl.store(bound_ptr + rows, tl.min(best, 1), mask=exist)
