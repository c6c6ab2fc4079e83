"""The description of one call that every engine reads: two sides, and which keys each row may see.

Side ``a`` is the target of the divergence; side ``b`` is compared with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Sequence(NamedTuple):
    """One run of rows and the run of keys they may see, inside one batch element.

    Row ``i`` (counted from ``q_start``) lies on key ``i + diagonal`` (counted from ``k_start``), or, where a key stands
    for several tokens (`Support.key_span`), on that token. A dense batch element, a packed (varlen) sequence, a chunk
    of a prefill and a context-parallel shard differ only in these numbers.
    """

    batch: int
    q_start: int
    q_len: int
    k_start: int
    k_len: int
    diagonal: int


class Tile(NamedTuple):
    """A block of rows against a block of keys, as slices of the N axes; ``masked`` if not all of it is allowed.

    ``offset`` is the key, or token (`Sequence`), that the tile's first row lies on, counted from the tile's first key.
    Where keys are selected (`Support.topk`), ``keys`` is a slice of the columns of top-k head ``topk_head``, ``run``
    the sequence's keys, and ``offset`` is counted from the first of them; `Support.selected_keys` reads the keys.
    """

    batch: int
    rows: slice
    keys: slice
    offset: int
    masked: bool
    topk_head: int = 0
    run: slice = slice(0)


class Inputs(NamedTuple):
    """The tensors of one divergence: ``q [B, H, Nq, D]`` and ``k [B, Hkv, Nk, D]`` of both sides, any strides.

    Where side ``b`` is head-summed (`Side.head_summed`), ``b_w [B, J, Nq]`` holds the weights of its heads, in any
    dtype; ``None`` stands for weights of 1.
    """

    a_q: Tensor
    a_k: Tensor
    b_q: Tensor
    b_k: Tensor
    b_w: Tensor | None = None


class Gradients(NamedTuple):
    """One gradient per input, ``None`` where it was not asked for."""

    a_q: Tensor | None
    a_k: Tensor | None
    b_q: Tensor | None
    b_k: Tensor | None
    b_w: Tensor | None = None


class AttentionOutput(NamedTuple):
    """What sparse attention computes: ``out [B, H, Nq, Dv]`` and the row stats ``m`` and ``ln_l [B, H, Nq]``.

    For a dead row ``out`` is 0, ``m`` -inf and ``ln_l`` 0. The log-sum-exp of a row is ``m + ln_l``. ``rest`` is what
    rounding to a half dtype took from ``out``, in its shape and dtype, which a backward needs. It is empty in other
    dtypes, and where no backward comes.
    """

    out: Tensor
    rest: Tensor
    m: Tensor
    ln_l: Tensor


@dataclass(frozen=True)
class Side:
    """One of the two distributions: ``heads`` query heads over ``kv_heads`` key heads of width ``dim``, in ``dtype``.

    Its logits are ``scale * <q, k>``, through a relu where ``relu`` is set. Each head is a distribution of its own,
    except where ``head_summed`` is set: then there is one key head and one distribution, whose logits are the heads'
    logits summed with per-query weights. That is an indexer, and only side ``b`` can be one.
    """

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    scale: float
    relu: bool = False
    head_summed: bool = False

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, scale: float | None = None, relu: bool = False, head_summed: bool = False
    ) -> Side:
        """Reads the side of ``q [B, H, Nq, D]`` and ``k [B, Hkv, Nk, D]``; the scale defaults to ``1/sqrt(D)``."""
        dim = q.shape[3]
        return cls(q.shape[1], k.shape[1], dim, q.dtype, dim**-0.5 if scale is None else scale, relu, head_summed)

    @property
    def distributions(self) -> int:
        """How many distributions the heads make."""
        return 1 if self.head_summed else self.heads

    def kv_head(self, head: int) -> int:
        """The key head that query head ``head`` reads."""
        return head // (self.heads // self.kv_heads)


@dataclass(frozen=True)
class Support:
    """Which keys each row may see.

    Row ``i`` of a sequence sees the keys from ``i + diagonal - left`` to ``i + diagonal + right``; ``None`` is
    unbounded. Causal masking is ``right = 0``; sequences are aligned bottom-right, so ``diagonal = k_len - q_len``.
    A packed batch is one batch element; ``cu_seqlens_q`` and ``cu_seqlens_k [sequences + 1]`` delimit its sequences.

    A key stands for ``key_span`` tokens. With more than one, under a causal mask without a window, row ``i`` lies on
    token ``i + diagonal``, where ``diagonal = (k_len - q_len // key_span) * key_span``, and sees a key from the key's
    last token on.

    ``topk [B, topk_heads, Nq, K]`` restricts a row to its selected keys: counted from the first key of its sequence, no
    key twice, negative for none. A selected key that is masked, or lies outside of the sequence, stays unseen. There is
    one top-k head for all heads, or one per run of consecutive heads (`topk_head`).
    """

    batch: int
    nq: int
    nk: int
    left: int | None = None
    right: int | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    topk: Tensor | None = None
    key_span: int = 1

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        left: int | None,
        right: int | None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        topk: Tensor | None = None,
        key_span: int = 1,
    ) -> Support:
        """Reads the support of ``q [B, H, Nq, D]`` and ``k [B, Hkv, Nk, D]``."""
        return cls(q.shape[0], q.shape[2], k.shape[2], left, right, cu_seqlens_q, cu_seqlens_k, topk, key_span)

    def topk_head(self, head: int, heads: int) -> int:
        """The head of ``topk`` that head ``head`` of ``heads`` reads."""
        return 0 if self.topk is None else head // (heads // self.topk.shape[1])

    def sequences(self) -> Iterator[Sequence]:
        """Walks the sequences: one per batch element, or the packed ones (which reads ``cu_seqlens`` on the host)."""
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            for batch in range(self.batch):
                yield Sequence(batch, 0, self.nq, 0, self.nk, self._diagonal(self.nq, self.nk))
            return
        starts_q, starts_k = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
        for n in range(len(starts_q) - 1):
            q_len, k_len = starts_q[n + 1] - starts_q[n], starts_k[n + 1] - starts_k[n]
            yield Sequence(0, starts_q[n], q_len, starts_k[n], k_len, self._diagonal(q_len, k_len))

    def _diagonal(self, q_len: int, k_len: int) -> int:
        """The key, or token, that row 0 lies on: the last row sees all keys."""
        return (k_len - q_len // self.key_span) * self.key_span

    def last_key(self, on: Any) -> Any:
        """The last key that rows on the keys, or tokens, ``on`` may see: of an integer or of a tensor of them."""
        assert self.right is not None
        return (on + self.right + 1) // self.key_span - 1

    def query_block_count(self, query_block: int) -> int:
        """How many query blocks a batch element has, of ``query_block`` consecutive rows of a sequence each.

        Tokens past the last packed sequence have blocks too, the last ones, which select no key.
        """
        if self.cu_seqlens_q is None or query_block == 1:
            return -(-self.nq // query_block)
        starts = [*self.cu_seqlens_q.tolist(), self.nq]
        return sum(-(-(end - start) // query_block) for start, end in itertools.pairwise(starts))

    def query_blocks(self, query_block: int) -> Iterator[tuple[Sequence, int]]:
        """Walks the sequences, each with the number of its first query block."""
        first = 0
        for seq in self.sequences():
            yield seq, first
            first += 0 if self.cu_seqlens_q is None else -(-seq.q_len // query_block)

    def live_rows(self, seq: Sequence) -> tuple[int, int]:
        """The half-open range of the sequence's rows that see at least one key, before any selection.

        The last row lies on the last key, so a window hides all keys from first rows alone.
        """
        if seq.k_len == 0 or (self.topk is not None and self.topk.shape[3] == 0):
            return 0, 0
        return 0 if self.right is None else max(0, self.key_span - 1 - seq.diagonal - self.right), seq.q_len

    def tiles(self, seq: Sequence, block_q: int, block_k: int, topk_head: int = 0) -> Iterator[list[Tile]]:
        """Walks the blocks of live rows; for each, the list of tiles that hold an allowed pair, and no other.

        Where keys are selected, the tiles cover all columns of top-k head ``topk_head``.
        """
        first, last = self.live_rows(seq)
        for i0 in range(first, last, block_q):
            i1 = min(i0 + block_q, last)
            if self.topk is not None:
                yield self._gathered_tiles(seq, i0, i1, block_k, topk_head)
            else:
                yield self.row_tiles(seq, i0, i1, block_k)

    def row_tiles(self, seq: Sequence, i0: int, i1: int, block_k: int) -> list[Tile]:
        """The tiles of the live rows ``[i0, i1)`` of a sequence that hold an allowed pair."""
        j_first = 0 if self.left is None else max(0, i0 + seq.diagonal - self.left)
        j_last = seq.k_len if self.right is None else min(seq.k_len, self.last_key(i1 - 1 + seq.diagonal) + 1)
        tiles = []
        for j0 in range(j_first, j_last, block_k):
            j1 = min(j0 + block_k, j_last)
            full = (self.right is None or j1 - 1 <= self.last_key(i0 + seq.diagonal)) and (
                self.left is None or j0 >= i1 - 1 + seq.diagonal - self.left
            )
            rows = slice(seq.q_start + i0, seq.q_start + i1)
            keys = slice(seq.k_start + j0, seq.k_start + j1)
            tiles.append(Tile(seq.batch, rows, keys, i0 + seq.diagonal - j0 * self.key_span, not full))
        return tiles

    def _gathered_tiles(self, seq: Sequence, i0: int, i1: int, block_k: int, topk_head: int) -> list[Tile]:
        assert self.topk is not None
        rows, run = slice(seq.q_start + i0, seq.q_start + i1), slice(seq.k_start, seq.k_start + seq.k_len)
        columns = self.topk.shape[3]
        return [
            Tile(seq.batch, rows, slice(j0, min(j0 + block_k, columns)), i0 + seq.diagonal, True, topk_head, run)
            for j0 in range(0, columns, block_k)
        ]

    def selected_keys(self, tile: Tile) -> Tensor:
        """The selected keys of a tile, ``[rows, keys]`` of int64 on the N axis; -1 where a row may not see one."""
        assert self.topk is not None
        keys = self.topk[tile.batch, tile.topk_head, tile.rows, tile.keys].long()
        allowed = self.allowed(keys, tile.offset, tile.run.stop - tile.run.start)
        return torch.where(allowed, keys + tile.run.start, -1)

    def allowed(self, keys: Tensor, offset: int, k_len: int) -> Tensor:
        """Which of its selected keys, ``[rows, K]`` counted from the first of its sequence, each row may see.

        ``offset`` is the key, or token, that the first row lies on, ``k_len`` how many keys the sequence has.
        """
        return (keys >= 0) & (keys < k_len) & ~self._outside(keys, offset)

    def disallowed(self, tile: Tile, device: torch.device) -> Tensor | None:
        """Which pairs of a tile are not allowed, ``[rows, keys]``, or ``None`` if all are."""
        if not tile.masked:
            return None
        rows, keys = (axis.stop - axis.start for axis in (tile.rows, tile.keys))
        return self._outside(torch.arange(keys, device=device).expand(rows, keys), tile.offset)

    def _outside(self, keys: Tensor, offset: int) -> Tensor:
        """Which of ``keys [rows, n]`` lie beyond the bounds of their row, the first of which lies on ``offset``."""
        on = torch.arange(keys.shape[0], device=keys.device)[:, None] + offset
        outside = torch.zeros_like(keys, dtype=torch.bool)
        if self.right is not None:
            outside |= keys > self.last_key(on)
        if self.left is not None:
            outside |= keys < on - self.left
        return outside


@dataclass(frozen=True)
class Problem:
    """One divergence ``KL(a || b)``: side ``a`` is the target, side ``b`` is compared with it.

    Forward KL has the teacher on side ``a``, reverse KL the student. Distribution ``r`` of ``b`` is compared with the
    mean of its head group: the ``head_group`` consecutive heads of ``a`` that start at ``r * head_group``. Where a
    group is several ``runs`` of as many heads, the target is the largest of the runs' means, key by key.
    """

    a: Side
    b: Side
    support: Support
    deterministic: bool = False
    runs: int = 1

    @property
    def distributions(self) -> int:
        """How many distributions of ``b`` there are: ``R``."""
        return self.b.distributions

    @property
    def head_group(self) -> int:
        """How many heads of ``a`` one distribution of ``b`` is compared with: ``H / R``."""
        return self.a.heads // self.distributions

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that rows and products are computed in."""
        return compute_dtype(self.a.dtype, self.b.dtype)


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """float32, or float64 where any input is."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def is_half(dtype: torch.dtype) -> bool:
    """Whether results are rounded to fewer bits than they are computed in."""
    return dtype in (torch.bfloat16, torch.float16)
