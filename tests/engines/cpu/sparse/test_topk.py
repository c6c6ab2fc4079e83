"""The best of a row of scores: every one of them, in order, whatever the scores are."""

import pytest
import torch
from torch import Tensor

from streamkl.sparse import index_topk

INF, NAN = float("inf"), float("nan")


def sampled(count: int) -> Tensor:
    """The places of the scores that bound a top-k. Where they are the highest, too few scores exceed the bound."""
    place = torch.arange(count) % 128
    return (place % 17 == 0) | (place % 17 == 8)


def rows_of_scores(count: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(count)
    normal = torch.randn(count, generator=rng)
    some = torch.rand(count, generator=rng)
    return {
        "normal": normal,
        "positive": normal.abs() + 1e-3,
        "negative": -normal.abs() - 1e-3,
        "one value": torch.full((count,), 0.5),
        "few values": (normal * 2).round(),
        "mostly zero": torch.where(some < 0.9, 0.0, normal),
        "zeros of both signs": torch.where(some < 0.5, 0.0, -0.0),
        "all exponents": torch.exp2(some * 250 - 125) * normal.sign(),
        "neighbouring floats": (torch.tensor(1.0).view(torch.int32) + (some * 40).int()).view(torch.float32),
        "falling": torch.arange(count, 0, -1).float(),
        "rising": torch.arange(count).float(),
        "infinite": torch.where(some < 0.2, INF, torch.where(some > 0.8, -INF, normal)),
        "not numbers": torch.where(some < 0.3, NAN, normal),
        "none": torch.full((count,), NAN),
        "high where sampled": torch.where(sampled(count), normal + 100, normal),
    }


def best_of(scores: Tensor, topk: int) -> Tensor:
    """Its definition: a stable sort of what has a score."""
    scored = torch.where(scores.isnan(), -INF, scores)
    order = scored.sort(descending=True, stable=True).indices
    order = order[scored[order] > -INF][:topk]
    return torch.nn.functional.pad(order, (0, topk - len(order)), value=-1).int()


@pytest.mark.parametrize("count", [1, 15, 16, 17, 70, 3000])
@pytest.mark.parametrize("kind", rows_of_scores(1))
def test_a_row_of_scores(count: int, kind: str) -> None:
    scores = rows_of_scores(count)[kind]
    one = torch.ones(1, 1, 1, 1)
    for topk in sorted({1, 2, 15, 16, 17, count // 3 + 1, max(1, count - 1), count, count + 20}):
        selected = index_topk(one, scores[None, :, None], topk=topk, activation=None, causal=False, backend="cpu")
        assert torch.equal(selected[0, 0], best_of(scores, topk)), topk
