"""A top-k of each query: rows in whole lanes and beyond, heads in one strip and in several, every mask."""

import pytest
import torch
from torch import Tensor

from streamkl.sparse import index_topk
from streamkl.sparse.scores import index_scores

MASKS = {"full": {"causal": False}, "causal": {"causal": True}, "window": {"causal": True, "window": (40, -1)}}


def whole(*shape: int, seed: int) -> Tensor:
    """Whole numbers, whose products and sums are exact in every order."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", [1, 4, 12, 64])
@pytest.mark.parametrize("scale", [0.25, -0.25, 0.0], ids=["", "negative", "zero"])
@pytest.mark.parametrize("activation", ["relu", None], ids=["relu", "linear"])
def test_single_queries_under_every_mask(activation, scale, heads, mask) -> None:
    """The keys of the highest scores, equal ones by lower index, whatever number of queries, keys and heads."""
    for queries, keys in ((1, 300), (15, 15), (53, 290), (290, 53)):
        q, k, w = whole(1, heads, queries, 8, seed=1), whole(1, keys, 8, seed=2), whole(1, queries, heads, seed=3)
        scores = index_scores(q, k, w, activation=activation, index_scale=scale, **MASKS[mask])[0]
        order = scores.sort(descending=True, stable=True).indices[:, :20]
        seen = scores.gather(-1, order) > -torch.inf
        expected = torch.nn.functional.pad(torch.where(seen, order, -1), (0, 20 - order.shape[1]), value=-1)
        options = {"topk": 20, "activation": activation, "index_scale": scale, "backend": "cpu", **MASKS[mask]}
        for dtype in (torch.float32, torch.bfloat16):
            found = index_topk(q.to(dtype), k.to(dtype), w, **options)[0]
            assert torch.equal(found, expected.int()), (queries, keys, dtype)
            unsorted = index_topk(q.to(dtype), k.to(dtype), w, sort=False, **options)[0]
            last = torch.where(found < 0, keys, found).sort(-1).values
            assert torch.equal(torch.where(unsorted < 0, keys, unsorted), last), "rising keys, then none"
