"""Tensors are made where the inputs are, whatever device ``torch.device`` makes the default."""

import functools

import pytest
import torch
from torch import Tensor

import streamkl
from streamkl import attention_kl, attention_lse, attention_mass, indexer_kl, topk_recall
from streamkl.sparse import (
    AttentionCall,
    IndexerSelector,
    IndexTensors,
    OracleSelector,
    RandomSelector,
    WindowSelector,
    index_scores,
    index_topk,
    oracle_topk,
    sparse_attention,
)

pytestmark = pytest.mark.usefixtures("small_tiles")

RNG = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(12, heads, 8, generator=RNG) for heads in (4, 2, 2))
STUDENT = tuple(torch.randn(12, heads, 8, generator=RNG) for heads in (4, 2))
INDEX = IndexTensors(*(torch.randn(shape, generator=RNG) for shape in ((12, 2, 8), (12, 8), (12, 2))))
TOPK = torch.stack([torch.randperm(12, generator=RNG)[:5] for _ in range(12)])
PACKED = {name: torch.tensor([0, 5, 12]) for name in ("cu_seqlens_q", "cu_seqlens_k")}
SELECTORS = (OracleSelector, IndexerSelector, WindowSelector, RandomSelector)


def batched(x: Tensor) -> Tensor:
    """A packed tensor as a batch of one sequence."""
    return (x.transpose(0, 1) if x.dim() == 3 else x)[None]


def under_meta(function, *args, **options) -> None:
    """The same result with another default device."""
    expected = function(*args, **options)
    with torch.device("meta"):
        found = function(*args, **options)
    assert found.device == torch.device("cpu")
    assert torch.equal(found, expected)


def trained(function, *args, **options) -> Tensor:
    """The gradients of a loss to all tensors of its student, one after another."""
    student = [x.clone().requires_grad_() for x in args[2:]]
    gradients = torch.autograd.grad(function(*args[:2], *student, **options), student)
    return torch.cat([x.flatten() for x in gradients])


@pytest.fixture(params=["batch", "packed"])
def layout(request: pytest.FixtureRequest):
    """Turns tensors into those of a layout, and gives the arguments of its sequences."""
    return (batched, {}) if request.param == "batch" else (lambda x: x, PACKED)


@pytest.mark.parametrize("with_topk", [False, True], ids=["", "topk"])
@pytest.mark.parametrize("kind", ["heads", "groups", "indexer", "lse"])
def test_losses_do_not_depend_on_the_default_device(backend: str, kind: str, with_topk: bool, layout) -> None:
    given, mask = layout
    if with_topk:
        mask = {**mask, "topk_indices": TOPK if mask else TOPK[None]}
    teacher = given(Q), given(K)
    for engine in {backend, "reference"}:
        options = {**mask, "causal": True, "backend": engine}
        if kind == "lse":
            under_meta(attention_lse, *teacher, **options)
            continue
        function = indexer_kl if kind == "indexer" else attention_kl
        student = STUDENT if kind == "heads" else tuple(x[:, :1] for x in STUDENT)
        student = tuple(map(given, INDEX if kind == "indexer" else student))
        under_meta(function, *teacher, *student, **options)
        under_meta(functools.partial(trained, function), *teacher, *student, **options)


@pytest.mark.selects
def test_selections_do_not_depend_on_the_default_device(backend: str, layout) -> None:
    given, mask = layout
    for query_block in (1, 4):
        options = {**mask, "topk": 3, "query_block": query_block, "backend": backend}
        under_meta(index_topk, *map(given, INDEX), normalise=True, **options)
        if backend != "triton":  # which has no oracle
            under_meta(oracle_topk, given(Q), given(K), **options)


def test_sparse_attention_does_not_depend_on_the_default_device(backend: str, layout) -> None:
    given, mask = layout
    for query_block in (1, 4):
        indices = oracle_topk(given(Q), given(K), topk=3, query_block=query_block, **mask)
        for engine in {backend, "reference"}:
            options = {**mask, "query_block": query_block, "backend": engine}
            under_meta(sparse_attention, given(Q), given(K), given(V), indices, **options)


@pytest.mark.filterwarnings("ignore:a top-k of")
@pytest.mark.parametrize("selector", SELECTORS, ids=lambda selector: selector.__name__)
def test_selectors_do_not_depend_on_the_default_device(selector, layout) -> None:
    given, mask = layout
    call = AttentionCall(given(Q), given(K), **mask, index=IndexTensors(*map(given, INDEX)))
    for query_block in (1, 4):
        under_meta(selector(topk=3, query_block=query_block).select, call)


def test_diagnostics_do_not_depend_on_the_default_device(layout) -> None:
    given, mask = layout
    under_meta(index_scores, *map(given, INDEX), **mask)
    for function in (attention_mass, topk_recall):
        under_meta(function, given(Q), given(K), TOPK if mask else TOPK[None], **mask)


def test_every_public_function_is_here() -> None:
    named = {attention_kl, attention_lse, attention_mass, indexer_kl, topk_recall}
    assert {getattr(streamkl, name) for name in streamkl.__all__ if name != "__version__"} == named
