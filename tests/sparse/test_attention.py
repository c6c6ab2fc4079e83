"""Sparse attention against its definition, materialised in float64."""

import pytest
import torch

from streamkl import reference
from streamkl.sparse import oracle_topk, sparse_attention
from streamkl.testing import random_sparse_case

pytestmark = pytest.mark.usefixtures("small_blocks", "nan_poison")


@pytest.mark.parametrize("query_block", [1, 4, 7])
@pytest.mark.parametrize("seed", range(20))
def test_double_equals_the_reference(seed, query_block, sparse_case) -> None:
    case = sparse_case(seed)
    v = torch.randn(*case.k.shape[:-1], 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    indices = oracle_topk(case.q, case.k, topk=case.topk, query_block=query_block, **case.mask)
    expected, _ = reference.sparse_attention(case.q, case.k, v, indices, query_block=query_block, **case.mask)
    out = sparse_attention(case.q, case.k, v, indices, query_block=query_block, **case.mask)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13, msg=str(case))


@pytest.mark.parametrize(
    ("query_block", "message"),
    [(1, "indices must have 8 query blocks, of 1 query each: got 3"), (4, "2 query blocks, of 4 queries each: got 3"),
     (8, "1 query block, of 8 queries each: got 3")],
)  # fmt: skip
def test_indices_for_another_number_of_query_blocks_are_refused(query_block: int, message: str) -> None:
    q, indices = torch.zeros(1, 1, 8, 4), torch.zeros(1, 3, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        sparse_attention(q, q, q, indices, query_block=query_block)


@pytest.mark.parametrize("seed", range(12))
def test_the_reference_of_pages_is_that_of_the_same_keys_in_one_piece(seed: int) -> None:
    case = random_sparse_case(seed).as_packed()
    k, v, page_table = case.pages()
    options = {"query_block": case.query_block, **case.mask}
    indices = torch.where(case.indices < page_table.shape[1] * k.shape[1], case.indices, -1)  # no sequence has others
    paged = sparse_attention(case.q, k, v, indices, **options, page_table=page_table, backend="reference")
    whole, _ = reference.sparse_attention(case.q, case.k, case.v, case.indices, **options)
    torch.testing.assert_close(paged, whole, rtol=0, atol=0, equal_nan=True)


def paged_call() -> dict:
    """A chunk of four queries after twelve keys, in pages 2 and 0 of three, each of eight tokens."""
    return {
        "q": torch.randn(4, 2, 6), "k": torch.randn(3, 8, 1, 6), "v": torch.randn(3, 8, 1, 5),
        "indices": torch.tensor([[3, 11, 15]]), "query_block": 4, "cu_seqlens_q": torch.tensor([0, 4]),
        "cu_seqlens_k": torch.tensor([0, 16]), "page_table": torch.tensor([[2, 0]]),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_q": None, "cu_seqlens_k": None}, "page_table needs packed queries: give cu_seqlens_q and"),
        ({"k": torch.zeros(16, 1, 6)}, r"k must be of shape \[pages, page_size, heads, dim\] with a page_table: got"),
        ({"v": torch.zeros(3, 4, 1, 5)}, "k and v must have the same tokens per page: got 8 and 4"),
        ({"v": torch.zeros(2, 8, 1, 5)}, "k and v must have the same pages: got 3 and 2"),
        ({"k": torch.zeros(3, 0, 1, 6), "v": torch.zeros(3, 0, 1, 5)}, "a page of k must have at least one token"),
        ({"k": torch.zeros(3, 8, 1, 7)}, "q and k must have the same head dim: got 6 and 7"),
        ({"page_table": torch.tensor([2, 0])}, r"page_table must be of shape \[1, pages\], a row per sequence: got"),
        ({"page_table": torch.tensor([[2, 0], [1, 0]])}, r"of shape \[1, pages\], a row per sequence: got \[2, 2\]"),
        ({"page_table": torch.tensor([[2.0, 0.0]])}, "page_table must be int32 or int64 on cpu: got torch.float32"),
        ({"page_table": torch.tensor([[2, 3]])}, "page_table must name pages from 0 to 2: got 3"),
        ({"page_table": torch.tensor([[-1, 0]])}, "page_table must name pages from 0 to 2: got -1"),
        ({"page_table": torch.tensor([[2]])}, "room for 8 keys of a sequence, in 1 pages of 8: got a sequence of 16"),
        ({"indices": torch.tensor([[3, 16]])}, "indices must be keys from 0 to 15, or -1 for none: got 16"),
        ({"q": torch.zeros(4, 2, 6, requires_grad=True)}, "sparse_attention has no gradients with a page_table"),
    ],
)
def test_wrong_pages_are_refused(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        sparse_attention(**{**paged_call(), **change})


def test_gradients_that_nobody_asks_for_are_no_reason_to_refuse_pages() -> None:
    call = paged_call()
    with torch.no_grad():
        out = sparse_attention(**{**call, "q": call["q"].requires_grad_()})
    assert not out.requires_grad
