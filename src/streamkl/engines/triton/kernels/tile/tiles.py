"""Where a tile is: the work of a program, its sequence, its rows, and the tiles that its mask touches.

Names, in all kernels: ``*_ptr`` is a pointer and ``*_ptrs`` a block of them; ``exist``, ``live`` and ``allowed`` are
masks of tokens, rows and pairs; ``m`` is a row max, and the suffixes ``_a`` and ``_b`` are the sides. Words in capitals
are constants of the compilation. Shapes are ``[ROWS]`` and ``[KEYS]``, of a tile ``[ROWS, KEYS]``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from streamkl.engines.triton.kernels.groups import Rows, SequenceRange, Tiles, Work


@triton.jit
def my_work(blocks, head_packs, parts):
    """The work of this program; only grid x is long enough for all axes."""
    pid = tl.program_id(0)
    part = pid % parts
    pid = pid // parts
    return Work(pid % blocks, pid // blocks % head_packs, pid // blocks // head_packs, part)


@triton.jit
def packed_sequence(number, batch, packed):
    """A sequence of a packed batch, by its number."""
    q_start = tl.load(packed.q_ptr + number * packed.q_stride).to(tl.int32)
    q_len = tl.load(packed.q_ptr + (number + 1) * packed.q_stride).to(tl.int32) - q_start
    k_start = tl.load(packed.k_ptr + number * packed.k_stride).to(tl.int32)
    k_len = tl.load(packed.k_ptr + (number + 1) * packed.k_stride).to(tl.int32) - k_start
    return SequenceRange(batch, q_start, q_len, k_start, k_len)


@triton.jit
def find_sequence(
    block,
    batch,
    support,
    PER: tl.constexpr,
    BLOCK: tl.constexpr,
    MASK: tl.constexpr,
    OF_KEYS: tl.constexpr = False,
):
    """The sequence that a block of queries, or of keys, lies in, and the block's number inside of it.

    A packed batch has ``T * PER // BLOCK + sequences`` blocks; sequence ``n`` starts at block
    ``start * PER // BLOCK + n``, which leaves room for its ragged last one.
    """
    if MASK.packed:
        own_ptr = support.packed.k_ptr if OF_KEYS else support.packed.q_ptr
        own_stride = support.packed.k_stride if OF_KEYS else support.packed.q_stride
        low = 0
        high = support.packed.count - 1
        for _ in range(support.packed.steps):
            middle = (low + high + 1) // 2
            start = tl.load(own_ptr + middle * own_stride).to(tl.int32) * PER // BLOCK + middle
            high = tl.where(start <= block, high, middle - 1)
            low = tl.where(start <= block, middle, low)
        sequence = packed_sequence(low, batch, support.packed)
        own_start = sequence.k_start if OF_KEYS else sequence.q_start
        return sequence, block - (own_start * PER // BLOCK + low)
    else:
        return SequenceRange(batch, batch * 0, support.nq, batch * 0, support.nk), block


@triton.jit
def packed_rows(
    block,
    head_pack,
    sequence,
    nq,
    head_packs,
    PACK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A block of packed rows: ``PACK`` heads lie interleaved."""
    row = block * ROWS + tl.arange(0, ROWS)
    queries = row // PACK
    heads = head_pack * PACK + row % PACK
    index = (sequence.batch.to(tl.int64) * (head_packs * PACK) + heads) * nq + sequence.q_start + queries
    return Rows(queries, heads, queries < sequence.q_len, index)


@triton.jit
def my_rows(work, support, counts, PACK: tl.constexpr, ROWS: tl.constexpr, MASK: tl.constexpr):
    """The sequence of this program's rows, their block's number inside of it, and the rows.

    Programs start in order, so that the rows that see the most keys come first.
    """
    sequence, block = find_sequence(counts.blocks - 1 - work.block, work.batch, support, PACK, ROWS, MASK)
    return sequence, block, packed_rows(block, work.head_pack, sequence, support.nq, counts.head_packs, PACK, ROWS)


@triton.jit
def group_index(rows, sequence, nq, head_packs, GROUP: tl.constexpr):
    """Places in the row vectors of side ``a``, ``[ROWS]``: those of the first head of each row's head group."""
    group = sequence.batch.to(tl.int64) * (head_packs * GROUP.pack) + rows.heads
    return group * GROUP.size * nq + sequence.q_start + rows.queries


@triton.jit
def row_pointers(x, batch, heads, tokens):
    """Pointers to the first element of heads of tokens."""
    return (
        x.ptr
        + batch.to(tl.int64) * x.stride_batch
        + heads.to(tl.int64) * x.stride_head
        + tokens.to(tl.int64) * x.stride_token
    )


@triton.jit
def cut(first, last, full_first, full_last, split, splits, BLOCK: tl.constexpr):
    """The tiles that ``[first, last)`` touches, and those among them that lie in ``[full_first, full_last)``.

    Of ``splits`` equal parts of them, part ``split``.
    """
    start = first // BLOCK
    end = tl.where(last > first, (last + BLOCK - 1) // BLOCK, start)
    each = (end - start + splits - 1) // splits
    start = tl.minimum(start + split * each, end)
    end = tl.minimum(start + each, end)
    full_start = (tl.maximum(full_first, 0) + BLOCK - 1) // BLOCK
    full_start = tl.minimum(tl.maximum(full_start, start), end)
    full_end = tl.minimum(tl.maximum(tl.maximum(full_last, 0) // BLOCK, full_start), end)
    return Tiles(start, end, full_start, full_end)


@triton.jit
def diagonal_of(sequence, MASK: tl.constexpr):
    """The key on the diagonal of query 0, or, where keys stand for several tokens, how many keys end before it."""
    if MASK.key_span == 1:
        return sequence.k_len - sequence.q_len
    else:
        return sequence.k_len - sequence.q_len // MASK.key_span


@triton.jit
def seen_before(query, diagonal, support, MASK: tl.constexpr):
    """How many keys the queries before one see, by the right bound of the mask; no query is negative."""
    if MASK.key_span == 1:
        return query + diagonal + support.right
    else:
        return query // MASK.key_span + diagonal


@triton.jit
def last_key(queries, diagonal, support, MASK: tl.constexpr):
    """The last keys that queries see, by the right bound of the mask."""
    if MASK.key_span == 1:
        return queries + diagonal + support.right
    else:
        return seen_before(queries + 1, diagonal, support, MASK) - 1


@triton.jit
def first_query(key, diagonal, support, MASK: tl.constexpr):
    """The first query that sees a key, by the right bound of the mask; it may be negative."""
    if MASK.key_span == 1:
        return key - diagonal - support.right
    else:
        return tl.maximum(key + 1 - diagonal, 0) * MASK.key_span - 1  # the product of any key may not fit 32 bits


@triton.jit
def key_tiles(
    block,
    sequence,
    support,
    split,
    splits,
    PACK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    MASK: tl.constexpr,
):
    """The tiles of keys that a block of packed rows sees."""
    i0 = block * ROWS // PACK
    i1 = tl.minimum((block * ROWS + ROWS - 1) // PACK + 1, sequence.q_len)
    diagonal = diagonal_of(sequence, MASK)
    first, full_first = 0, 0
    last, full_last = sequence.k_len, sequence.k_len
    if MASK.left:
        first = tl.maximum(0, i0 + diagonal - support.left)
        full_first = i1 - 1 + diagonal - support.left
    if MASK.right:
        last = tl.minimum(sequence.k_len, seen_before(i1, diagonal, support, MASK))
        full_last = tl.minimum(sequence.k_len, last_key(i0, diagonal, support, MASK) + 1)
    last = tl.where(i1 > i0, last, first)
    return cut(first, last, full_first, full_last, split, splits, KEYS)


@triton.jit
def row_tiles(
    block,
    sequence,
    support,
    split,
    splits,
    PACK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    MASK: tl.constexpr,
):
    """The tiles of packed rows that see one of a block of keys."""
    j0 = block * KEYS
    j1 = tl.minimum(j0 + KEYS, sequence.k_len)
    diagonal = diagonal_of(sequence, MASK)
    first, full_first = 0, 0
    last, full_last = sequence.q_len, sequence.q_len
    if MASK.right:
        first = tl.maximum(0, first_query(j0, diagonal, support, MASK))
        full_first = first_query(j1 - 1, diagonal, support, MASK)
    if MASK.left:
        last = tl.minimum(sequence.q_len, j1 - diagonal + support.left)
        full_last = tl.minimum(sequence.q_len, j0 - diagonal + support.left + 1)
    last = tl.where(j1 > j0, last, first)
    full_last = tl.where(j1 - j0 == KEYS, full_last, 0)  # in a ragged block of keys every tile is masked
    return cut(first * PACK, last * PACK, full_first * PACK, full_last * PACK, split, splits, ROWS)


@triton.jit
def tile_count(tiles, MASKED: tl.constexpr):
    """How many tiles are full, or are not."""
    full = tiles.full_end - tiles.full_start
    if MASKED:
        return tiles.end - tiles.start - full
    else:
        return full


@triton.jit
def nth_tile(n, tiles, MASKED: tl.constexpr):
    """The ``n``-th of the full tiles, or of those that are not."""
    if MASKED:
        t = tiles.start + n
        return tl.where(t < tiles.full_start, t, t + tiles.full_end - tiles.full_start)
    else:
        return tiles.full_start + n


@triton.jit
def allowed_pairs(queries, keys, sequence, support, MASK: tl.constexpr):
    """Which pairs of queries and keys of a sequence are allowed, ``[ROWS, KEYS]``."""
    diagonal = diagonal_of(sequence, MASK)
    allowed = (queries[:, None] < sequence.q_len) & (keys[None, :] < sequence.k_len)
    if MASK.right:
        allowed &= keys[None, :] <= last_key(queries[:, None], diagonal, support, MASK)
    if MASK.left:
        allowed &= keys[None, :] >= queries[:, None] + diagonal - support.left
    return allowed


@triton.jit
def sees_a_key(queries, sequence, support, tiles, KEYS: tl.constexpr, MASK: tl.constexpr):
    """Which queries see a key of the tiles, ``[ROWS]``."""
    diagonal = diagonal_of(sequence, MASK)
    first = tiles.start * KEYS
    last = tl.minimum(tiles.end * KEYS, sequence.k_len)
    live = (queries < sequence.q_len) & (last > first)
    if MASK.right:
        live &= last_key(queries, diagonal, support, MASK) >= first
    if MASK.left:
        live &= queries + diagonal - support.left < last
    return live
