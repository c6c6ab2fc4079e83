"""An indexer learns where a teacher with planted structure looks."""

import pytest
import torch

from streamkl import attention_mass, topk_recall
from streamkl.indexer import HeadIndexer
from streamkl.sparse import oracle_topk

STEPS, EVERY, COMPARED = 200, 25, 50


def train(planted_batch, backend: str, steps: int) -> tuple[list[float], list[float], float]:
    """Losses of some steps; mass relative to the oracle, every 25 steps, on held-out tokens; recall at the end."""
    torch.manual_seed(0)
    hidden, q, k = planted_batch(10**6)
    topk = hidden.shape[1] // 10
    oracle = attention_mass(q, k, oracle_topk(q, k, topk=topk))
    indexer = HeadIndexer(hidden.shape[2], head_dim=32, rope_dim=16)
    optimizer = torch.optim.Adam(indexer.parameters(), lr=3e-3)
    losses, shares = [], [float(attention_mass(q, k, indexer.topk(hidden, topk)) / oracle)]
    for step in range(steps):
        loss = indexer.loss(*planted_batch(step), backend=backend)  # type: ignore[arg-type]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % EVERY == EVERY - 1:
            shares.append(float(attention_mass(q, k, indexer.topk(hidden, topk)) / oracle))
    return losses, shares, float(topk_recall(q, k, indexer.topk(hidden, topk)))


@pytest.mark.slow
def test_two_hundred_steps_cover_the_oracles_mass_and_the_reference_loss_gives_the_same_curve(planted_batch) -> None:
    losses, shares, recall = train(planted_batch, "auto", STEPS)
    print(f"share of the oracle's mass at 10% of the keys: {shares}; recall at the end: {recall:.3f}")
    assert shares[0] < 0.6
    assert shares[-1] >= 0.95
    reference_losses, reference_shares, _ = train(planted_batch, "reference", COMPARED)
    found = (*losses[:COMPARED], *shares[: 1 + COMPARED // EVERY])
    for ours, theirs in zip(found, (*reference_losses, *reference_shares), strict=True):
        assert abs(ours - theirs) <= 0.01 * theirs, f"{ours} and {theirs}"
