"""Seeded problems over the contract of ``sparse_attention``, ``index_topk`` and ``oracle_topk``."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamkl import reference
from streamkl.testing.problems import DTYPES, draw_sequences, draw_topk, draw_window, guarded

DIMS = ((16, 16), (40, 24), (59, 7), (64, 64), (128, 128), (192, 128), (96, 144))
"""Head dims of keys and values: equal ones, those of MLA, and odd ones."""

QUERY_BLOCKS = (1, 1, 2, 5, 16, 64)


PAGE_SIZES = (1, 3, 16, 128)


class Pages(NamedTuple):
    """Packed keys and values in pages: ``k`` and ``v [pages, page_size, Hkv, D]``, ``page_table [sequences, n]``."""

    k: Tensor
    v: Tensor
    page_table: Tensor


@dataclass
class SparseCase:
    """Attention, an indexer over the same tokens, and selected keys. Tensors are dense or packed (varlen).

    Every tensor is a view into a larger one of nan. Queries that see no key hold nan, and so do keys that no query sees
    and values that no query that sees them selected.

    Attributes:
        seed: What it was drawn with.
        q: ``[B, H, Nq, D]``, or packed ``[Tq, H, D]``.
        k: ``[B, Hkv, Nk, D]``, or packed ``[Tk, Hkv, D]``.
        v: ``[B, Hkv, Nk, Dv]``, or packed ``[Tk, Hkv, Dv]``.
        index: ``index_q [B, J, Nq, Di]``, ``index_k [B, Nk, Di]`` and ``index_w [B, Nq, J]`` or ``None``, whole numbers
            whose scores are exact in every dtype, so that they tie often.
        indices: ``[B, query_blocks, K]``, packed ``[query_blocks, K]``: random selected keys.
        query_block: How many queries share their top-k.
        topk: How many keys to select.
        activation: Of the indexer.
        mask: ``causal``, ``window``, ``cu_seqlens_q``, ``cu_seqlens_k``.
        scale: Of the attention.
        sink: ``[H]``: a logit per head that belongs to no key; ``None`` for none.
    """

    seed: int
    q: Tensor
    k: Tensor
    v: Tensor
    index: tuple[Tensor, Tensor, Tensor | None]
    indices: Tensor
    query_block: int
    topk: int
    activation: Any
    mask: dict[str, Any]
    scale: float | None
    sink: Tensor | None = None

    @property
    def packed(self) -> bool:
        """Whether sequences are packed."""
        return self.q.dim() == 3

    def starts(self) -> tuple[list[int], list[int]]:
        """The starts of sequences, and the end of the last, in queries and keys."""
        if self.packed:
            return self.mask["cu_seqlens_q"].tolist(), self.mask["cu_seqlens_k"].tolist()
        return [0, self.q.shape[2]], [0, self.k.shape[2]]

    def allowed(self) -> Tensor:
        """``[Nq, Nk]`` of bool: what the mask allows."""
        nq, nk = (x.shape[0 if self.packed else 2] for x in (self.q, self.k))
        return reference.allowed_pairs(nq, nk, *(self.mask[name] for name in MASK))

    @property
    def tensors(self) -> list[Tensor]:
        """``q``, ``k`` and ``v``, and the sink if there is one: what has gradients."""
        return [x for x in (self.q, self.k, self.v, self.sink) if x is not None]

    def clean(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """`tensors` with 0 where nothing may be read, cast to ``dtype`` if given."""
        return [torch.where(x.isnan(), 0.0, x).to(dtype or x.dtype) for x in self.tensors]

    def as_packed(self) -> SparseCase:
        """The same attention with its batch elements as packed sequences; the indexer is left as it is."""
        if self.packed:
            return self
        starts = ((torch.arange(self.q.shape[0] + 1) * x.shape[2]).int() for x in (self.q, self.k))
        mask = {**self.mask, **dict(zip(MASK[2:], starts, strict=True))}
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v, indices=self.indices.flatten(0, 1), mask=mask)

    def pages(self) -> Pages:
        """The keys and values of packed sequences in pages of a random size and order, with nan in all other places.

        Columns of the page table that no sequence fills hold numbers that are no pages.
        """
        rng, lengths = random.Random(self.seed), self.mask["cu_seqlens_k"].diff().tolist()
        size = rng.choice(PAGE_SIZES)
        counts = [-(-length // size) for length in lengths]
        order = list(range(sum(counts) + rng.choice((1, 4))))
        rng.shuffle(order)
        table = torch.full((len(lengths), max(counts, default=0) + rng.choice((0, 2))), rng.choice((-1, 1 << 30)))
        k, v = (x.new_full((len(order), size, *x.shape[1:]), torch.nan) for x in (self.k, self.v))
        first = 0
        for n, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            table[n, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int64)
            for j in range(length):
                page = table[n, j // size]
                k[page, j % size], v[page, j % size] = self.k[first + j], self.v[first + j]
            first += length
        return Pages(*(guarded(x, rng, "cpu") for x in (k, v, table.to(rng.choice((torch.int32, torch.int64))))))

    def upstream(self) -> Tensor:
        """The gradient of the output, random, in its shape and dtype: nan for queries that see no selected key."""
        shape = [*self.q.shape[:-1], self.v.shape[-1]]
        d_out = torch.randn(shape, generator=torch.Generator().manual_seed(self.seed))
        nq, nk = (x.shape[0 if self.packed else 2] for x in (self.q, self.k))
        mask = (self.mask[name] for name in MASK)
        live = reference.selected_pairs(nq, nk, self.indices, self.query_block, *mask).any(-1)  # [B, 1, Nq]
        live = live[0, 0, :, None, None] if self.packed else live[..., None]
        return d_out.masked_fill(~live, torch.nan).to(self.q.dtype)

    def __str__(self) -> str:
        mask = {name: x.tolist() if isinstance(x, Tensor) else x for name, x in self.mask.items()}
        return (
            f"seed {self.seed}: q {list(self.q.shape)}, k {list(self.k.shape)}, v {list(self.v.shape)} "
            f"{str(self.q.dtype)[6:]}, index_q {list(self.index[0].shape)}, weights {self.index[2] is not None}, "
            f"indices {list(self.indices.shape)}, query_block {self.query_block}, topk {self.topk}, {mask}, "
            f"scale {self.scale}, sink {self.sink is not None}"
        )


MASK = ("causal", "window", "cu_seqlens_q", "cu_seqlens_k")


def random_sparse_case(
    seed: int, *, dtypes: tuple[torch.dtype, ...] = DTYPES, max_tokens: int = 80, max_heads: int = 21
) -> SparseCase:
    """Draws one problem; the same seed gives the same problem.

    Args:
        seed: Any integer.
        dtypes: The dtypes to draw from.
        max_tokens: The most queries, and keys, of a batch element or of all packed sequences together.
        max_heads: The most query heads, three or more.

    Examples:
        >>> from streamkl.testing import check_sparse_attention, random_sparse_case
        >>> check_sparse_attention(random_sparse_case(3), backend="tiled").worst <= 1
        True
    """
    rng, values = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype, (dim, v_dim), query_block = rng.choice(dtypes), rng.choice(DIMS), rng.choice(QUERY_BLOCKS)
    kv_heads = rng.choice((1, 1, 2, 3))
    heads = kv_heads * min(rng.choice((1, 1, 2, 4, 7)), max_heads // kv_heads)
    index_heads = rng.choice((1, 1, 3, 8))
    index_dim = rng.choice((4, 16, 33, 64))
    cu_seqlens = None
    if rng.random() < 0.35:
        batch, (tokens, cu_seqlens) = 1, draw_sequences(rng, max_tokens)
    else:
        batch, nq = rng.choice((1, 1, 2)), rng.randint(1, max_tokens)
        tokens = (nq, nq if rng.random() < 0.5 else rng.randint(1, max_tokens))
    mask: dict[str, Any] = dict.fromkeys(MASK)
    mask |= {"causal": rng.random() < 0.7, "window": draw_window(rng, max_tokens)}
    if cu_seqlens is not None:
        kind = rng.choice((torch.int32, torch.int64))
        mask["cu_seqlens_q"], mask["cu_seqlens_k"] = (torch.tensor(starts, dtype=kind) for starts in cu_seqlens)

    (nq, nk), spread = tokens, rng.choice((0.3, 1.0, 3.0))
    q, k, v = (
        torch.randn(batch, n, count, width, generator=values)
        for n, count, width in ((heads, nq, dim), (kv_heads, nk, dim), (kv_heads, nk, v_dim))
    )
    q = q * spread
    index_q, index_k, index_w = (
        torch.randint(-2, 3, shape, generator=values).float()
        for shape in ((batch, index_heads, nq, index_dim), (batch, nk, index_dim), (batch, nq, index_heads))
    )
    query_blocks = count_query_blocks(nq, query_block, cu_seqlens)
    indices = _draw_indices(rng, batch, query_blocks, nk, cu_seqlens, query_block)
    _poison(q, k, v, indices, query_block, mask)
    tensors = [q, k, v, index_q, index_k, index_w]
    if cu_seqlens is not None:
        tensors = [x[0].transpose(0, 1) if x.dim() == 4 else x[0] for x in tensors]
    tensors = [guarded(x.to(dtype), rng, "cpu") for x in tensors]
    index = (tensors[3], tensors[4], tensors[5] if rng.random() < 0.6 else None)
    topk, activation, scale = rng.choice((1, 3, 8, 20, nk + 5)), rng.choice(("relu", "relu", None)), (None, None, 0.3)
    q, k, v = tensors[:3]
    case = SparseCase(seed, q, k, v, index, indices, query_block, topk, activation, mask, rng.choice(scale))
    if rng.random() < 0.25:
        case.sink = (2 * torch.randn(heads, generator=values)).to(dtype)
    return case


def _poison(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, query_block: int, mask: dict[str, Any]) -> None:
    """Puts nan where nothing may be read, into tensors ``[B, heads, N, D]``."""
    allowed = reference.allowed_pairs(q.shape[2], k.shape[2], *(mask[name] for name in MASK))
    q[:, :, ~allowed.any(1)] = torch.nan
    k[:, :, ~allowed.any(0)] = torch.nan
    seen = reference.selected_pairs(q.shape[2], k.shape[2], indices, query_block, *(mask[name] for name in MASK))
    v.masked_fill_(~seen.any(-2)[..., None], torch.nan)  # [B, 1, Nk, 1]


def count_query_blocks(nq: int, query_block: int, cu_seqlens: tuple[list[int], list[int]] | None) -> int:
    """How many query blocks a batch element has."""
    starts = [0, nq] if cu_seqlens is None else [*cu_seqlens[0], nq]
    return sum(-(-(starts[n + 1] - starts[n]) // query_block) for n in range(len(starts) - 1))


def _draw_indices(
    rng: random.Random,
    batch: int,
    query_blocks: int,
    nk: int,
    cu_seqlens: tuple[list[int], list[int]] | None,
    query_block: int,
) -> Tensor:
    """Selected keys as `draw_topk` draws them, one row per query block."""
    starts = None
    if cu_seqlens is not None:
        counts = [
            -(-(end - start) // query_block) for start, end in zip(cu_seqlens[0][:-1], cu_seqlens[0][1:], strict=True)
        ]
        starts = ([sum(counts[:n]) for n in range(len(counts) + 1)], cu_seqlens[1])
    return draw_topk(rng, batch, None, (query_blocks, nk), starts)
