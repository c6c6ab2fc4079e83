"""A top-k of each query: rows in whole lanes and beyond, heads in one strip and in several, masks, packed sequences."""

import pytest
import torch
from torch import Tensor

from streamkl.sparse import index_topk
from streamkl.sparse.scores import index_scores

MASKS = {
    "full": {"causal": False},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (40, -1)},
    "both_sides": {"causal": False, "window": (40, 7)},
    "right": {"causal": False, "window": (-1, 7)},
}


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


def test_single_queries_of_packed_sequences() -> None:
    """Also of one without keys, and of queries past the last sequence."""
    starts_q, starts_k = torch.tensor([0, 20, 25, 70]), torch.tensor([0, 300, 300, 340])
    q, k, w = whole(80, 4, 8, seed=1), whole(340, 8, seed=2), whole(80, 4, seed=3)
    options = {"topk": 9, "index_scale": 0.25}
    found = index_topk(q, k, w, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, backend="cpu", **options)
    for n in range(3):
        rows, keys = slice(starts_q[n], starts_q[n + 1]), slice(starts_k[n], starts_k[n + 1])
        if starts_k[n + 1] == starts_k[n]:
            assert (found[rows] == -1).all()
            continue
        alone = index_topk(q[None, rows].transpose(1, 2), k[None, keys], w[None, rows], backend="tiled", **options)
        assert torch.equal(found[rows], alone[0])
    assert (found[70:] == -1).all()


def test_an_infinite_product_has_no_score_where_the_scale_is_zero() -> None:
    k = torch.ones(1, 40, 8)
    k[0, 3] = torch.inf
    q, w = torch.ones(1, 2, 1, 8), torch.ones(1, 1, 2)
    found = index_topk(q, k, w, topk=40, index_scale=0.0, causal=False, backend="cpu")
    assert 3 not in found[0, 0].tolist()
    assert found[0, 0, -1] == -1


def test_a_query_is_its_own_block_whether_scores_are_normalised_or_not() -> None:
    """The operator says so as the function does."""
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([[[-1.0], [-2.0], [1.0]]])
    found = torch.ops.streamkl.index_topk(
        q, k[:, None], None, -1.0, True, True, True, 2, None, None, None, None, 1, "cpu"
    )
    assert found.tolist() == [[[1, 0]]]
