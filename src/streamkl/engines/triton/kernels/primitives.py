"""The tile code of all kernels: where a tile is, its logits, and the row states of ``state.py``.

Names: ``b_*`` values of a tile, ``p_*`` pointers, ``o_*`` offsets, ``m_*`` masks, except the row max ``m_a`` and
``m_b``. A row that has seen no key has a row max of ``NONE``, a finite number: its sums are multiplied by
``exp(NONE - m) = 0`` once it sees a key, and discarded if it never does. ``NONE`` lies below every logit that the
contract covers (1e30), and far enough from the end of float32 that a thousand times it is finite.

Kernels are compiled without contraction (``enable_fp_fusion=False``): ``x * scale - m`` must be 0 where ``m`` is
``x * scale``, or a row with one key would have a divergence. A fused multiply-add is written where it is wanted.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
NONE = tl.constexpr(-1.0e34)
SMALLEST = tl.constexpr(1.0e-37)
"""Below it a logarithm may be that of 0; such a probability adds far less than a rounding to a divergence."""
IGNORED = tl.constexpr(1.0e30)
"""The ``log2 l`` of ignored rows: whatever they hold, their probabilities are 0."""


@triton.jit
def find_sequence(
    block, batch, cu, extent, OWN: tl.constexpr, PER: tl.constexpr, BLOCK: tl.constexpr, MASK: tl.constexpr
):
    """The sequence that a block of the axis ``OWN`` (0 queries, 1 keys) lies in, and the block's number inside of it.

    A packed batch has ``T * PER // BLOCK + sequences`` blocks; sequence ``n`` starts at block
    ``start * PER // BLOCK + n``, which leaves room for its ragged last one.

    Returns ``(batch, q_start, q_len, k_start, k_len, block)``.
    """
    if MASK.packed:
        low = 0
        high = cu[4] - 1
        for _ in range(cu[5]):
            middle = (low + high + 1) // 2
            start = tl.load(cu[OWN] + middle * cu[2 + OWN]).to(tl.int32) * PER // BLOCK + middle
            high = tl.where(start <= block, high, middle - 1)
            low = tl.where(start <= block, middle, low)
        q_start = tl.load(cu[0] + low * cu[2]).to(tl.int32)
        q_len = tl.load(cu[0] + (low + 1) * cu[2]).to(tl.int32) - q_start
        k_start = tl.load(cu[1] + low * cu[3]).to(tl.int32)
        k_len = tl.load(cu[1] + (low + 1) * cu[3]).to(tl.int32) - k_start
        own_start = q_start if OWN == 0 else k_start
        return batch, q_start, q_len, k_start, k_len, block - (own_start * PER // BLOCK + low)
    else:
        return batch, batch * 0, extent[0], batch * 0, extent[1], block


@triton.jit
def cut(first, last, full_first, full_last, split, splits, BLOCK: tl.constexpr):
    """The tiles that ``[first, last)`` touches, and those among them that lie in ``[full_first, full_last)``.

    Of ``splits`` equal parts of them, part ``split``. Returns ``(start, end, full_start, full_end)`` in tiles.
    """
    start = first // BLOCK
    end = tl.where(last > first, (last + BLOCK - 1) // BLOCK, start)
    each = (end - start + splits - 1) // splits
    start = tl.minimum(start + split * each, end)
    end = tl.minimum(start + each, end)
    full_start = (tl.maximum(full_first, 0) + BLOCK - 1) // BLOCK
    full_start = tl.minimum(tl.maximum(full_start, start), end)
    full_end = tl.minimum(tl.maximum(tl.maximum(full_last, 0) // BLOCK, full_start), end)
    return start, end, full_start, full_end


@triton.jit
def key_tiles(i0, i1, q_len, k_len, extent, split, splits, BLOCK: tl.constexpr, MASK: tl.constexpr):
    """The tiles of keys that the rows ``[i0, i1)`` of a sequence see, as `cut` returns them."""
    on = k_len - q_len  # the key on the diagonal of row 0
    first, full_first = 0, 0
    last, full_last = k_len, k_len
    if MASK.left:
        first = tl.maximum(0, i0 + on - extent[2])
        full_first = i1 - 1 + on - extent[2]
    if MASK.right:
        last = tl.minimum(k_len, i1 + on + extent[3])
        full_last = tl.minimum(k_len, i0 + on + extent[3] + 1)
    last = tl.where(i1 > i0, last, first)
    return cut(first, last, full_first, full_last, split, splits, BLOCK)


@triton.jit
def row_tiles(
    j0, j1, q_len, k_len, extent, split, splits, ROWS: tl.constexpr, KEYS: tl.constexpr, PACK: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """The tiles of packed rows that see one of the keys ``[j0, j1)`` of a sequence, as `cut` returns them."""
    on = k_len - q_len
    first, full_first = 0, 0
    last, full_last = q_len, q_len
    if MASK.right:
        first = tl.maximum(0, j0 - on - extent[3])
        full_first = j1 - 1 - on - extent[3]
    if MASK.left:
        last = tl.minimum(q_len, j1 - on + extent[2])
        full_last = tl.minimum(q_len, j0 - on + extent[2] + 1)
    last = tl.where(j1 > j0, last, first)
    full_last = tl.where(j1 - j0 == KEYS, full_last, 0)  # in a ragged block of keys every tile is masked
    return cut(first * PACK, last * PACK, full_first * PACK, full_last * PACK, split, splits, ROWS)


@triton.jit
def masked_tile(n, start, full_start, full_end):
    """The ``n``-th tile from ``start`` on that is not full."""
    t = start + n
    return tl.where(t < full_start, t, t + full_end - full_start)


@triton.jit
def allowed_pairs(o_i, o_j, q_len, k_len, extent, MASK: tl.constexpr):
    """Which pairs of rows ``o_i`` and keys ``o_j`` are allowed, ``[rows, keys]``."""
    on = k_len - q_len
    m_pair = (o_i[:, None] < q_len) & (o_j[None, :] < k_len)
    if MASK.right:
        m_pair &= o_j[None, :] <= o_i[:, None] + on + extent[3]
    if MASK.left:
        m_pair &= o_j[None, :] >= o_i[:, None] + on - extent[2]
    return m_pair


@triton.jit
def sees_a_key(o_i, q_len, k_len, extent, first, last, MASK: tl.constexpr):
    """Which rows ``o_i`` see one of the keys ``[first, last)``."""
    on = k_len - q_len
    last = tl.minimum(last, k_len)
    m_row = (o_i < q_len) & (last > first)
    if MASK.right:
        m_row &= o_i + on + extent[3] >= first
    if MASK.left:
        m_row &= o_i + on - extent[2] < last
    return m_row


@triton.jit
def load_tile(
    p_n, m_n, stride_d, d0, DIM: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, TOTAL: tl.constexpr = 0
):  # fmt: skip
    """Columns ``d0 .. d0 + BLOCK`` of the tokens at ``p_n``, ``[tokens, BLOCK]``; 0 past dim and, if masked, ``m_n``.

    Columns need no mask where ``BLOCK`` (or ``TOTAL``, the width of several such blocks) divides the head dim.
    """
    o_d = d0 + tl.arange(0, BLOCK)
    p = p_n[:, None] + (o_d.to(tl.int64) * stride_d)[None, :]
    if DIM % (TOTAL if TOTAL > 0 else BLOCK) == 0:
        if MASKED:
            return tl.load(p, mask=m_n[:, None], other=0.0)
        else:
            return tl.load(p)
    else:
        if MASKED:
            return tl.load(p, mask=m_n[:, None] & (o_d < DIM)[None, :], other=0.0)
        else:
            return tl.load(p, mask=(o_d < DIM)[None, :], other=0.0)


@triton.jit
def zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """An accumulator, ``[ROWS, COLUMNS]``."""
    return tl.zeros([ROWS, COLUMNS], tl.float32)


@triton.jit
def finite(b_x):
    """``b_x`` with 0 where it is not finite: a masked pair adds ``0 * k``, which must be 0."""
    b_f = b_x.to(tl.float32)
    return tl.where(tl.abs(b_f) < float("inf"), b_x, 0.0)


@triton.jit
def dot(b_x, b_y, UPCAST: tl.constexpr):
    """``b_x @ b_y`` in float32."""
    if UPCAST:
        b_x = b_x.to(tl.float32)
        b_y = b_y.to(tl.float32)
    return tl.dot(b_x, b_y, input_precision="ieee")


@triton.jit
def dot_add(b_x, b_y, b_acc, UPCAST: tl.constexpr):
    """``b_acc + b_x @ b_y`` in float32."""
    if UPCAST:
        b_x = b_x.to(tl.float32)
        b_y = b_y.to(tl.float32)
    return tl.dot(b_x, b_y, b_acc, input_precision="ieee")


@triton.jit
def chunked_product(
    p_q, m_q, stride_qd, p_k, m_k, stride_kd, dim, ROWS: tl.constexpr, KEYS: tl.constexpr, SIDE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """``q @ k^T`` of heads too wide to hold, ``[rows, keys]``: both are read again, chunk by chunk.

    ``dim`` is that of the side, but not a constant: else the loop would be unrolled, and its registers spilled.
    """
    b_s = tl.zeros([ROWS, KEYS], tl.float32)
    for d0 in range(0, dim, SIDE.block):
        b_q = load_tile(p_q, m_q, stride_qd, d0, SIDE.dim, SIDE.block, True)
        b_k = load_tile(p_k, m_k, stride_kd, d0, SIDE.dim, SIDE.block, MASKED)
        b_s = dot_add(b_q, tl.trans(b_k), b_s, SIDE.upcast)
    return b_s


@triton.jit
def product(
    b_q, b_k, p_q, m_q, stride_qd, p_k, m_k, stride_kd, dim,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SIDE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """``q @ k^T`` of a tile, from the tiles held or, where heads are too wide to hold, chunk by chunk."""
    if SIDE.chunked:
        return chunked_product(p_q, m_q, stride_qd, p_k, m_k, stride_kd, dim, ROWS, KEYS, SIDE, MASKED)
    else:
        return dot(b_q, tl.trans(b_k), SIDE.upcast)


@triton.jit
def exp(x):
    """``e^x`` by the instruction for ``2^x``; ``tl.exp`` spends three more on results too small to matter."""
    return tl.exp2(x * LOG2E)


@triton.jit
def logits(b_s, scale, SIDE: tl.constexpr):
    """The logits of a tile of products."""
    b_x = b_s * scale
    if SIDE.relu:
        b_x = tl.maximum(b_x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return b_x


@triton.jit
def head_summed_logits(
    p_q, m_q, stride_qh, stride_qd, p_w, stride_wh, b_k, p_k, m_k, stride_kd, dim, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SIDE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The logits of a head-summed side, ``[rows, keys]``: the sum over heads, each times its weight in the row.

    Pointers are those of the first head; the keys of all heads are held in ``b_k`` unless they are too wide.
    """
    b_x = tl.zeros([ROWS, KEYS], tl.float32)
    for _ in range(SIDE.heads):
        if SIDE.chunked:
            b_s = chunked_product(p_q, m_q, stride_qd, p_k, m_k, stride_kd, dim, ROWS, KEYS, SIDE, MASKED)
        else:
            b_q = load_tile(p_q, m_q, stride_qd, 0, SIDE.dim, SIDE.block, True)
            b_s = dot(b_q, tl.trans(b_k), SIDE.upcast)
        b_y = logits(b_s, scale, SIDE)
        if SIDE.weighted:
            b_x = tl.fma(b_y, tl.broadcast_to(head_weights(p_w, m_q)[:, None], b_y.shape), b_x)
            p_w += stride_wh
        else:
            b_x += b_y
        p_q += stride_qh
    return b_x


@triton.jit
def head_weights(p_w, m_q):
    """The weights of an index head, ``[rows]``, in float32."""
    return tl.load(p_w, mask=m_q, other=0.0).to(tl.float32)


@triton.jit
def update_lse(m, l, b_x):
    """The state of `LogSumExp` after another tile of logits."""
    top = tl.maximum(m, tl.max(b_x, 1))
    l = l * exp(m - top) + tl.sum(exp(b_x - top[:, None]), 1)
    return top, l


@triton.jit
def update_paired(m_a, l_a, m_b, l_b, acc, b_a, b_b):
    """The state of `PairedState` after another tile of both sides' logits.

    Where ``a`` is -inf, its weight is 0 and it adds 0, unless ``b`` is not finite either.
    """
    top_a = tl.maximum(m_a, tl.max(b_a, 1))
    top_b = tl.maximum(m_b, tl.max(b_b, 1))
    b_a = b_a - top_a[:, None]
    b_b = b_b - top_b[:, None]
    b_w = exp(b_a)
    alpha = exp(m_a - top_a)
    shift = (m_a - top_a) - (m_b - top_b)
    acc = alpha * (acc + l_a * shift) + tl.sum(b_w * (tl.maximum(b_a, NONE) - b_b), 1)
    l_a = alpha * l_a + tl.sum(b_w, 1)
    l_b = exp(m_b - top_b) * l_b + tl.sum(exp(b_b), 1)
    return top_a, l_a, top_b, l_b, acc


@triton.jit
def mean_of(b_p, GROUP: tl.constexpr):
    """The mean of a head group's probabilities from their sum: exact, so that the mean of ones is 1."""
    if GROUP.size & (GROUP.size - 1) == 0:
        return b_p * (1.0 / GROUP.size)
    else:
        return tl.div_rn(b_p, tl.full(b_p.shape, GROUP.size, tl.float32))


@triton.jit
def mixture_terms(b_p, b_b):
    """``p [ln p - b]`` of a tile: 0 where ``p`` is, unless ``b`` is not finite."""
    return b_p * (tl.log(tl.maximum(b_p, SMALLEST)) - b_b)


@triton.jit
def update_mixture(m_b, l_b, s, acc, b_p, b_b):
    """The state of `MixtureState` after another tile of the target and of the logits of ``b``."""
    top = tl.maximum(m_b, tl.max(b_b, 1))
    b_b = b_b - top[:, None]
    acc = acc + tl.where(s != 0, s * (top - m_b), 0.0) + tl.sum(mixture_terms(b_p, b_b), 1)
    s = s + tl.sum(b_p, 1)
    l_b = l_b * exp(m_b - top) + tl.sum(exp(b_b), 1)
    return top, l_b, s, acc


@triton.jit
def log_of_ratio(x, y):
    """``ln(x / y)`` of row vectors, to the last digit: it dominates the divergence of similar distributions."""
    return tl.log(x.to(tl.float64) / y.to(tl.float64)).to(tl.float32)


@triton.jit
def checked_maximum(m, m_live):
    """``m``, nan where a row saw a key and yet has no row max, because its logits are nan or -inf."""
    return tl.where(m_live & (m <= NONE), float("nan"), m)


@triton.jit
def log2_probabilities(b_x, l):
    """``log2(exp(x) / l)`` of shifted logits, where ``l`` is given as ``log2``."""
    return tl.fma(b_x, tl.full(b_x.shape, LOG2E, tl.float32), tl.broadcast_to(-l[:, None], b_x.shape))


@triton.jit
def target(
    p_q, p_m, p_l, m_q, stride_qh, stride_qd, nq, dim, p_k, m_k, stride_kh, stride_kd, first_head, scale, m_pair,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SIDE: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The sum of the probabilities of a head group, ``[rows, keys]``.

    Pointers are those of the first head of the group; each key head is loaded once for all heads that read it.
    """
    b_p = tl.zeros([ROWS, KEYS], tl.float32)
    for n in range(GROUP.kv):
        kv = (first_head + n * GROUP.each) // SIDE.per_kv
        p_kv = p_k + kv.to(tl.int64) * stride_kh
        if not SIDE.chunked:
            b_k = load_tile(p_kv, m_k, stride_kd, 0, SIDE.dim, SIDE.block, MASKED)
        for _ in range(GROUP.each):
            if SIDE.chunked:
                b_s = chunked_product(p_q, m_q, stride_qd, p_kv, m_k, stride_kd, dim, ROWS, KEYS, SIDE, MASKED)
            else:
                b_q = load_tile(p_q, m_q, stride_qd, 0, SIDE.dim, SIDE.block, True)
                b_s = dot(b_q, tl.trans(b_k), SIDE.upcast)
            m = tl.load(p_m, mask=m_q, other=0.0)
            l = tl.load(p_l, mask=m_q, other=0.0)
            b_p += tl.exp2(log2_probabilities(logits(b_s, scale, SIDE) - m[:, None], l))
            p_q += stride_qh
            p_m += nq
            p_l += nq
    if MASKED:
        b_p = tl.where(m_pair, b_p, 0.0)
    return b_p


@triton.jit
def my_block(blocks, head_groups, splits):
    """The work of this program: ``(block, head_group, batch, split)``; only grid x is long enough for all axes."""
    pid = tl.program_id(0)
    split = pid % splits
    pid = pid // splits
    return pid % blocks, pid // blocks % head_groups, pid // blocks // head_groups, split


@triton.jit
def packed_rows(block, head_group, batch, q_start, q_len, nq, head_groups, PACK: tl.constexpr, ROWS: tl.constexpr):
    """A block of packed rows: ``(o_i, o_h, m_q, o_row)``, queries, heads, which exist, places in row vectors."""
    o_m = block * ROWS + tl.arange(0, ROWS)
    o_i = o_m // PACK
    o_h = head_group * PACK + o_m % PACK
    o_row = (batch.to(tl.int64) * (head_groups * PACK) + o_h) * nq + q_start + o_i
    return o_i, o_h, o_i < q_len, o_row


@triton.jit
def row_pointers(q, strides, batch, o_h, o_n):
    """Pointers to the first element of heads ``o_h`` of tokens ``o_n``."""
    return q + batch.to(tl.int64) * strides[0] + o_h.to(tl.int64) * strides[1] + o_n.to(tl.int64) * strides[2]
