"""What kernels are given, and what their functions hand to each other: arguments that belong together, by name.

Triton flattens a group into its fields: the alignment of a pointer and a stride of 1 are known as they would be of
arguments of their own. A field that is None, or 1, is a constant of the kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# What the host gives to a kernel.


class Strided(NamedTuple):
    """A tensor ``[B, heads, tokens, dim]``: its pointer and its strides, None for an axis that it does not have."""

    ptr: Any
    stride_batch: Any
    stride_head: Any
    stride_token: Any
    stride_dim: Any = None


class SideArguments(NamedTuple):
    """One side: ``q [B, H, Nq, D]``, ``k [B, Hkv, Nk, D]`` and, for an indexer, weights ``w [B, J, Nq]``.

    ``dim`` is the head dim, but not a constant of the kernel: else the loop over its chunks would be unrolled, and its
    registers spilled.
    """

    q: Strided
    k: Strided
    w: Strided | None
    dim: Any
    scale: Any


class PackedStarts(NamedTuple):
    """The starts of ``count`` packed sequences; ``steps`` halvings find one of them.

    ``query_block_ptr`` has the first query block of each sequence, where queries select in blocks.
    """

    q_ptr: Any
    k_ptr: Any
    q_stride: Any
    k_stride: Any
    count: Any
    steps: Any
    query_block_ptr: Any = None


class SupportArguments(NamedTuple):
    """Which keys a query may see: lengths, the window's sides where the mask has them, and packed sequences."""

    nq: Any
    nk: Any
    left: Any
    right: Any
    packed: PackedStarts | None


class TopkArguments(NamedTuple):
    """The selected keys ``[B, topk_heads, Nq, columns]``; ``per_head`` heads read one top-k head."""

    indices: Strided
    columns: Any
    per_head: Any


class PageArguments(NamedTuple):
    """The pages ``[sequences, n]`` that hold each sequence: rows are ``stride`` apart, a page has ``size`` tokens."""

    ptr: Any
    stride: Any
    size: Any


class RowStatPtrs(NamedTuple):
    """The row stats of a side, ``m`` and ``log2 l``, each ``[B, heads, Nq]``, or pointers to those of a tile's rows."""

    m: Any
    log2_l: Any


class GradientRowPtrs(NamedTuple):
    """The row vectors that a gradient pass reads, each ``[B, heads, Nq]``.

    ``mean`` is read where side ``a`` wants gradients. If a side is float16, ``weight`` was divided by
    ``weight_divisor``; ``index_divisor`` is that of index weights.
    """

    a: RowStatPtrs
    b: RowStatPtrs
    weight: Any
    mean: Any
    weight_divisor: Any
    index_divisor: Any


class LseOut(NamedTuple):
    """Results of a log-sum-exp, each ``[B, H, Nq]``."""

    m: Any
    ln_l: Any


class PairedOut(NamedTuple):
    """Results head by head, each ``[B, R, Nq]``."""

    kl: Any
    mean: Any
    m_a: Any
    ln_l_a: Any
    m_b: Any
    ln_l_b: Any


class MixtureOut(NamedTuple):
    """Results against a head mean, each ``[B, R, Nq]``."""

    kl: Any
    m_b: Any
    ln_l_b: Any
    s: Any


class GradientOut(NamedTuple):
    """Gradients, and the sums of a loss; None for what is not wanted."""

    dq_a: Any = None
    dk_a: Any = None
    dq_b: Any = None
    dk_b: Any = None
    dw_b: Any = None
    sum_p: Any = None
    sum_acc: Any = None


class AttentionOut(NamedTuple):
    """Results of sparse attention: ``out [B, H, Nq, Dv]`` and the row stats, each ``[B, H, Nq]``.

    ``rest`` is what rounding took from ``out``, or None. ``d_lse`` is the gradient of the log-sum-exp ``m + ln_l``,
    where a backward has one.
    """

    out: Strided
    rest: Strided | None
    m: Any
    ln_l: Any
    d_lse: Any = None


class AttentionRowPtrs(NamedTuple):
    """The row vectors of sparse attention's backward, each ``[B, H, Nq]``: the pass over queries makes them.

    ``log2_l`` is ``IGNORED`` for a dead row, and nan for one whose gradient is not finite. ``delta`` is the inner
    product of the output and its gradient. ``several`` is 1 for a row that sees several keys, and 0 for one that sees a
    single key, whose softmax is constant.
    """

    log2_l: Any
    delta: Any
    several: Any


class KeyPairs(NamedTuple):
    """The query blocks that select keys of each block of keys: ``[start[n], start[n + 1])`` are those of block ``n``.

    ``query`` is the first query of each, counted in its sequence, rising; ``bits`` says which keys of the block it
    selects.
    """

    start: Any
    query: Any
    bits: Any


class Parts(NamedTuple):
    """The states of split keys, ``[fields, splits, rows]``."""

    ptr: Any
    splits: Any
    rows: Any


class RowCounts(NamedTuple):
    """Programs that own a block of packed rows, and one of ``splits`` of the keys."""

    blocks: Any
    head_packs: Any
    splits: Any


class QueryCounts(NamedTuple):
    """The same for gradients: one of ``pieces`` of their columns; ``rows`` rows in all."""

    blocks: Any
    head_packs: Any
    pieces: Any
    splits: Any
    rows: Any


class KeyCounts(NamedTuple):
    """Programs that own a block of keys and the ``span`` head packs that read it.

    Each computes one of ``pieces`` of the columns, from one of ``splits`` of the rows.
    """

    blocks: Any
    owners: Any
    span: Any
    pieces: Any
    splits: Any


class GatheredCounts(NamedTuple):
    """Programs that own one query, one of ``parts`` of a head pack and one of ``pieces`` of a gradient's columns."""

    blocks: Any
    head_packs: Any
    parts: Any
    pieces: Any


class AttentionCounts(NamedTuple):
    """Programs that own one of ``parts`` of a query block's rows, and one of ``pieces`` of the columns."""

    query_block: Any
    query_blocks: Any
    kv_heads: Any
    parts: Any
    pieces: Any


class AttentionKeyCounts(NamedTuple):
    """Programs that own a block of keys of a key head, and one of ``pieces`` of the columns.

    Queries come in blocks of ``query_block``.
    """

    query_block: Any
    blocks: Any
    kv_heads: Any
    pieces: Any


class ScoreCounts(NamedTuple):
    """Programs that own a tile of query blocks, and one of ``key_tiles`` tiles of keys from ``first_key_tile`` on.

    A batch element has ``tiles`` tiles of its ``query_blocks``; ``first_tile`` is counted over all of them. Rows of
    scores are ``stride`` apart.
    """

    tiles: Any
    first_tile: Any
    key_tiles: Any
    first_key_tile: Any
    query_blocks: Any
    stride: Any


class RankCounts(NamedTuple):
    """Programs that rank rows of ``columns`` scores, ``stride`` apart, of the keys from ``first_key`` on.

    The results have ``topk`` columns, and are written from ``first_column`` on.
    """

    rows: Any
    columns: Any
    stride: Any
    first_key: Any
    topk: Any
    first_column: Any


# What the functions of a kernel hand to each other.


class Work(NamedTuple):
    """The work of a program: its place on each axis of the counts."""

    block: Any
    head_pack: Any
    batch: Any
    part: Any


class SequenceRange(NamedTuple):
    """A sequence: where its queries and keys start in the batch element, and how many there are."""

    batch: Any
    q_start: Any
    q_len: Any
    k_start: Any
    k_len: Any


class Rows(NamedTuple):
    """The rows of a tile, ``[ROWS]``: query in the sequence, head, whether it exists, place in row vectors."""

    queries: Any
    heads: Any
    exist: Any
    index: Any


class Tiles(NamedTuple):
    """The tiles ``[start, end)``, of which ``[full_start, full_end)`` need no mask."""

    start: Any
    end: Any
    full_start: Any
    full_end: Any


class Tokens(NamedTuple):
    """Queries or keys of a tile: pointers ``[N]``, which exist ``[N]``, and the tile ``[N, BLOCK]`` if it is held."""

    ptrs: Any
    exist: Any
    stride_dim: Any
    tile: Any


class Selection(NamedTuple):
    """The selected keys of the queries ``[first, last)``: a row of ``columns`` indices."""

    ptr: Any
    stride: Any
    columns: Any
    first: Any
    last: Any


class LseState(NamedTuple):
    """`LogSumExp` of ``state.py`` in registers, ``[ROWS]``."""

    m: Any
    l: Any


class PairedState(NamedTuple):
    """`PairedState` of ``state.py`` in registers, ``[ROWS]``."""

    m_a: Any
    l_a: Any
    m_b: Any
    l_b: Any
    acc: Any


class MixtureState(NamedTuple):
    """`MixtureState` of ``state.py`` in registers, ``[ROWS]``."""

    m_b: Any
    l_b: Any
    s: Any
    acc: Any


class RowValues(NamedTuple):
    """Row vectors of a gradient pass in registers, ``[ROWS]``; ``live`` rows are not ignored."""

    m_a: Any
    log2_l_a: Any
    m_b: Any
    log2_l_b: Any
    weight: Any
    mean: Any
    live: Any


class TileA(NamedTuple):
    """Side ``a`` in a tile, ``[ROWS, KEYS]``: ``p`` is the sum of a head group, the others are of its only head."""

    products: Any
    shifted: Any
    log2_p: Any
    p: Any


class TileB(NamedTuple):
    """Side ``b`` in a tile, ``[ROWS, KEYS]``: `scores`, logits less the row max, and ``log2 q``."""

    scores: Any
    shifted: Any
    log2_q: Any


class Piece(NamedTuple):
    """A piece of the columns of gradients: its first column on each side, and whether it is the first piece."""

    first_a: Any
    first_b: Any
    is_first: Any


class Factors(NamedTuple):
    """What sums of products are multiplied by to become gradients, and the divisor of index weights in them."""

    a: Any
    b: Any
    w: Any
    index_divisor: Any


class KeyBlock(NamedTuple):
    """A block of keys, ``[KEYS]``, on both sides, and the columns of them that dQ needs."""

    keys: Any
    k_a: Tokens
    k_b: Tokens
    columns_a: Any
    columns_b: Any


class KeyGradients(NamedTuple):
    """dK of a block of keys, ``[KEYS, GRAD]``."""

    dk_a: Any
    dk_b: Any


class QueryBlock(NamedTuple):
    """A block of rows on both sides, and pointers to the keys that it reads.

    ``q_b`` and ``w_ptrs`` are those of an indexer's first head, ``q_head`` and ``w_head`` of the head that the program
    owns.
    """

    queries: Any
    q_a: Tokens
    q_b: Tokens
    q_head: Tokens
    w_ptrs: Any
    w_head: Any
    k_ptrs_a: Any
    k_ptrs_b: Any
    stats_a: RowStatPtrs
    first_head: Any


class QueryGradients(NamedTuple):
    """dQ of a block of rows, ``[ROWS, GRAD]``; dW and the sums of a loss, ``[ROWS]``."""

    dq_a: Any
    dq_b: Any
    dw: Any
    sum_p: Any
    sum_acc: Any
