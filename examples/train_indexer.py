"""Trains an indexer on a frozen attention layer, and shows what its selection of keys is worth.

    python examples/train_indexer.py

The teacher attends to earlier tokens of the same class as its own, so there is something to find: a tenth of the keys
holds nearly all of the attention. The indexer is one small head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamkl import attention_lse, attention_mass
from streamkl.indexer import HeadIndexer
from streamkl.sparse import oracle_topk

TOKENS, CLASSES, WIDTH, HEADS, DIM = 512, 16, 64, 8, 32


class Teacher:
    """A frozen attention layer with 8 query and 2 key heads."""

    def __init__(self) -> None:
        self.embedding = torch.randn(CLASSES, WIDTH)
        self.k = torch.randn(2, WIDTH, DIM) / WIDTH**0.5
        self.q = self.k.repeat_interleave(HEADS // 2, 0) + 0.1 * torch.randn(HEADS, WIDTH, DIM) / WIDTH**0.5

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states ``[1, N, WIDTH]``, and the queries and keys that the layer makes of them."""
        hidden = self.embedding[torch.randint(CLASSES, (1, TOKENS))] + 0.1 * torch.randn(1, TOKENS, WIDTH)
        return hidden, torch.einsum("bnw,hwd->bhnd", hidden, self.q), torch.einsum("bnw,hwd->bhnd", hidden, self.k)


def covered(indexer: HeadIndexer, hidden: Tensor, q: Tensor, k: Tensor, topk: int) -> float:
    """The attention mass on the indexer's keys, relative to that on the best keys."""
    mass = attention_mass(q, k, indexer.topk(hidden, topk=topk))
    return float(mass / attention_mass(q, k, oracle_topk(q, k, topk=topk)))


def main(steps: int = 150) -> tuple[float, float]:
    """Runs the training; returns the covered part of the oracle's mass before and after, on held-out tokens."""
    torch.manual_seed(0)
    teacher = Teacher()
    held_out, topk = teacher.batch(), TOKENS // 10
    indexer = HeadIndexer(WIDTH, head_dim=32, rope_dim=16)
    optimizer = torch.optim.Adam(indexer.parameters(), lr=3e-3)
    before = covered(indexer, *held_out, topk)
    for step in range(steps):
        hidden, q, k = teacher.batch()
        lse = attention_lse(q, k, causal=True)  # fused attention returns it anyway
        loss = indexer.loss(hidden, q, k, teacher_lse=lse)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0 or step == steps - 1:
            share = covered(indexer, *held_out, topk)
            print(f"step {step:3d}  KL {loss.item():.4f}  {share:.1%} of the oracle's mass, {topk} of {TOKENS} keys")
    return before, covered(indexer, *held_out, topk)


if __name__ == "__main__":
    main()
