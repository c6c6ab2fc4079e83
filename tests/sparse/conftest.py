"""Seeded attention and indexers for the tests of ``sparse``, and what they compute, materialised in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from streamkl import reference
from streamkl.engines import tiled_attention, tiled_topk
from streamkl.sparse import diagnostics


@dataclass
class SparseCase:
    """A teacher, an indexer over the same tokens, and the mask: ``mask`` goes to the functions under test."""

    seed: int
    q: Tensor
    k: Tensor
    index_q: Tensor
    index_k: Tensor
    index_w: Tensor | None
    mask: dict[str, Any]
    topk: int

    @property
    def packed(self) -> bool:
        return self.q.dim() == 3

    @property
    def allowed(self) -> Tensor:
        nq, nk = (self.q.shape[0], self.k.shape[0]) if self.packed else (self.q.shape[2], self.k.shape[2])
        names = ("causal", "window", "cu_seqlens_q", "cu_seqlens_k")
        return reference.allowed_pairs(nq, nk, *(self.mask.get(name) for name in names))  # type: ignore[arg-type]

    def attention(self) -> Tensor:
        """``[B, Nq, Nk]``: the mean over heads of the softmax over the allowed keys, 0 elsewhere."""
        q, k = (self.q.transpose(0, 1)[None], self.k.transpose(0, 1)[None]) if self.packed else (self.q, self.k)
        logits = reference.logits(q.double(), k.double(), None).masked_fill(~self.allowed, -torch.inf)
        return logits.softmax(-1).nan_to_num(0.0).mean(1)

    def scores(self, relu: bool = True) -> Tensor:
        """``[B, Nq, Nk]``: the indexer's scores, ``-inf`` at keys that are not allowed."""
        q, k, w = self.index_q, self.index_k, self.index_w
        if self.packed:
            q, k, w = q.transpose(0, 1)[None], k[None], None if w is None else w[None]
        x = torch.einsum("bjnd,bmd->bjnm", q.double(), k.double()) * q.shape[-1] ** -0.5
        x = x.relu() if relu else x
        weights = torch.ones(q.shape[0], q.shape[2], q.shape[1]) if w is None else w
        scores = torch.einsum("bjnm,bnj->bnm", x, weights.double())
        return scores.masked_fill(~self.allowed, -torch.inf)

    def first_keys(self) -> Tensor:
        """``[Nq, 1]``: the first key of each row's sequence, from which keys are counted."""
        starts = torch.zeros(self.allowed.shape[0], 1, dtype=torch.int64)
        if self.packed:
            cu_q, cu_k = self.mask["cu_seqlens_q"].tolist(), self.mask["cu_seqlens_k"].tolist()
            for n in range(len(cu_q) - 1):
                starts[cu_q[n] : cu_q[n + 1]] = cu_k[n]
        return starts

    def selected(self, indices: Tensor) -> Tensor:
        """``[B, Nq, Nk]`` of bool: which keys ``indices [B, Nq, K]`` select."""
        nk = self.allowed.shape[1]
        keys = torch.where(indices < 0, nk, indices.long() + self.first_keys()).clamp(max=nk)
        return torch.zeros(*indices.shape[:2], nk + 1, dtype=torch.bool).scatter_(-1, keys, True)[..., :nk]

    def rows(self, x: Tensor) -> Tensor:
        """A result with its batch axis back."""
        return x[None] if self.packed else x

    def __str__(self) -> str:
        return f"seed {self.seed}: q {list(self.q.shape)}, k {list(self.k.shape)}, {self.mask}, topk {self.topk}"


def draw_case(seed: int, dtype: torch.dtype = torch.float64, **fixed: Any) -> SparseCase:
    """Draws a case; whole numbers of few values in every third one, so that scores tie exactly."""
    rng, torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        if seed % 3 == 0:
            return torch.randint(-1, 2, shape, generator=torch_rng).to(dtype)
        return torch.randn(shape, generator=torch_rng).to(dtype)

    kv_heads = rng.choice((1, 2, 3))
    heads, index_heads = kv_heads * rng.choice((1, 2, 4)), rng.choice((1, 1, 3, 8))
    dim, index_dim, batch = 16, 4, rng.choice((1, 2))
    nq, nk = rng.randint(1, 70), rng.randint(1, 70)
    nk = nq if rng.random() < 0.5 else nk
    mask: dict[str, Any] = {
        "causal": rng.random() < 0.7,
        "window": rng.choice((None, None, (rng.randint(0, 20), -1), (5, 3))),
    }
    packed = rng.random() < 0.4
    if packed:
        starts_q = sorted(rng.randint(0, nq) for _ in range(3))
        starts_k = starts_q if nq == nk else sorted(rng.randint(0, nk) for _ in range(3))
        mask["cu_seqlens_q"] = torch.tensor([0, *starts_q], dtype=torch.int32)
        mask["cu_seqlens_k"] = torch.tensor([0, *starts_k], dtype=torch.int32)
    weighted = rng.random() < 0.6
    if packed:
        shapes = [(nq, heads, dim), (nk, kv_heads, dim), (nq, index_heads, index_dim), (nk, index_dim)]
        w_shape = (nq, index_heads)
    else:
        shapes = [(batch, heads, nq, dim), (batch, kv_heads, nk, dim), (batch, index_heads, nq, index_dim)]
        shapes, w_shape = [*shapes, (batch, nk, index_dim)], (batch, nq, index_heads)
    q, k, index_q, index_k = (draw(*shape) for shape in shapes)
    w = draw(*w_shape) if weighted else None
    return SparseCase(seed, q, k, index_q, index_k, w, {**mask, **fixed}, rng.choice((1, 3, 8, 100)))


def rank(scores: Tensor, topk: int) -> Tensor:
    """``[B, Nq, topk]`` by its definition: one key after another, the highest score first, then the lowest key."""
    out = torch.full((*scores.shape[:2], topk), -1)
    for b, rows in enumerate(scores.tolist()):
        for i, row in enumerate(rows):
            ranked = sorted((-score, j) for j, score in enumerate(row) if score != -torch.inf)[:topk]
            out[b, i, : len(ranked)] = torch.tensor([j for _, j in ranked], dtype=torch.int64)
    return out


@pytest.fixture
def sparse_case() -> Callable[..., SparseCase]:
    return draw_case


@pytest.fixture
def materialised_topk() -> Callable[[Tensor, int], Tensor]:
    return rank


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that a small problem has many of them."""
    monkeypatch.setattr(tiled_topk, "BLOCK_Q", 8)
    monkeypatch.setattr(tiled_topk, "BLOCK_K", 12)
    monkeypatch.setattr(tiled_attention, "GATHERED", 1000)
    monkeypatch.setattr(diagnostics, "GATHERED", 1000)
