"""Attention mass and recall against their definitions, materialised in float64."""

import pytest
import torch

from streamkl import attention_lse, attention_mass, topk_recall
from streamkl.sparse import oracle_topk

pytestmark = pytest.mark.usefixtures("small_blocks", "nan_poison")
SEEDS = range(60)


def draw_indices(case, seed: int) -> torch.Tensor:
    """Selected keys without repetition, with padding anywhere, and keys that the mask hides among them."""
    rng = torch.Generator().manual_seed(seed)
    attention = case.attention()
    count = 1 + seed % attention.shape[-1]
    indices = torch.rand(attention.shape, generator=rng).argsort(-1)[..., :count]
    indices[torch.rand(indices.shape, generator=rng) < 0.2] = -1
    return indices.int() if seed % 2 else indices


@pytest.mark.parametrize("seed", SEEDS)
def test_attention_mass_equals_its_definition(seed, sparse_case) -> None:
    case = sparse_case(seed)
    indices, attention = draw_indices(case, seed), case.attention()
    given = indices[0] if case.packed else indices
    expected = (attention * case.selected(indices)).sum(-1)
    rows = attention_mass(case.q, case.k, given, reduction="none", **case.mask)
    torch.testing.assert_close(case.rows(rows), expected, rtol=1e-10, atol=1e-12, msg=str(case))
    alive = case.allowed.any(-1).expand_as(expected)
    mean = expected[alive].mean() if alive.any() else torch.tensor(0.0).double()
    torch.testing.assert_close(attention_mass(case.q, case.k, given, **case.mask), mean, msg=str(case))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_recall_equals_its_definition(seed, sparse_case) -> None:
    """The oracle's keys are those of `oracle_topk`, which `test_selection` holds to the definition."""
    case = sparse_case(seed)
    indices = draw_indices(case, seed)
    given = indices[0] if case.packed else indices
    oracle = case.selected(case.rows(oracle_topk(case.q, case.k, topk=case.topk, **case.mask)))
    hits = (oracle & case.selected(indices)).sum(-1)
    expected = torch.where(hits > 0, hits / oracle.sum(-1).clamp(min=1), 0.0)
    rows = topk_recall(case.q, case.k, given, topk=case.topk, reduction="none", **case.mask)
    torch.testing.assert_close(case.rows(rows), expected, msg=str(case))
    alive = case.allowed.any(-1).expand_as(expected)
    mean = expected[alive].mean() if alive.any() else torch.tensor(0.0)
    torch.testing.assert_close(topk_recall(case.q, case.k, given, topk=case.topk, **case.mask), mean, msg=str(case))


@pytest.mark.parametrize("seed", range(20))
def test_no_selection_covers_more_than_the_oracles(seed, sparse_case) -> None:
    case = sparse_case(seed)
    oracle = oracle_topk(case.q, case.k, topk=case.topk, **case.mask)
    covered = attention_mass(case.q, case.k, oracle, reduction="none", **case.mask)
    expected = case.attention().sort(-1, descending=True).values[..., : case.topk].sum(-1)
    torch.testing.assert_close(case.rows(covered), expected, rtol=1e-10, atol=1e-12, msg=str(case))
    if case.allowed.any():
        recall = topk_recall(case.q, case.k, oracle, **case.mask)
        assert recall == 1, str(case)


def test_every_visible_key_is_the_whole_mass_and_none_is_nothing() -> None:
    q, k = torch.randn(2, 9, 30, 64), torch.randn(2, 3, 30, 64)
    everything = torch.arange(30).expand(2, 30, 30)
    torch.testing.assert_close(attention_mass(q, k, everything, reduction="none"), torch.ones(2, 30))
    nothing = torch.full((2, 30, 4), -1)
    assert attention_mass(q, k, nothing) == 0
    assert topk_recall(q, k, nothing) == 0
    assert attention_mass(q, k, nothing[..., :0]) == 0


def test_a_given_lse_saves_the_pass_and_changes_nothing(sparse_case, monkeypatch: pytest.MonkeyPatch) -> None:
    case = sparse_case(4)
    indices = draw_indices(case, 4)
    indices = indices[0] if case.packed else indices
    lse = attention_lse(case.q, case.k, **case.mask)
    expected = attention_mass(case.q, case.k, indices, **case.mask)
    monkeypatch.setattr("streamkl.sparse.arguments.attention_lse", None)
    assert attention_mass(case.q, case.k, indices, lse=lse, **case.mask) == expected


def test_half_precision_inputs_err_by_their_rounding() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 8, 40, 32).bfloat16(), torch.randn(1, 2, 40, 32).bfloat16()
    indices = oracle_topk(q, k, topk=6)
    exact = attention_mass(q.double(), k.double(), indices, reduction="none")
    mass = attention_mass(q, k, indices, reduction="none")
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (torch.zeros(1, 5, 2), "indices must be int32 or int64"),
        (torch.zeros(1, 4, 2).int(), r"indices must be of shape \[1, 5, 'K'\]: got \[1, 4, 2\]"),
        (torch.full((1, 5, 2), 5), "indices must be keys from 0 to 4, or -1 for none: got 5"),
        (torch.full((1, 5, 2), -2), "or -1 for none: got -2"),
        (torch.tensor([0, 1, 0]).expand(1, 5, 3), "indices must not have a key twice in a row: got 0"),
    ],
)
def test_wrong_indices_are_refused(indices, message) -> None:
    q, k = torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8)
    for function in (attention_mass, topk_recall):
        with pytest.raises(ValueError, match=message):
            function(q, k, indices)


def test_a_wrong_reduction_is_refused() -> None:
    q, indices = torch.zeros(1, 2, 5, 8), torch.zeros(1, 5, 1).int()
    for function in (attention_mass, topk_recall):
        with pytest.raises(ValueError, match="reduction must be 'mean' or 'none': got 'sum'"):
            function(q, q, indices, reduction="sum")  # type: ignore[arg-type]
