"""Sparse attention against its definition, materialised in float64."""

import pytest
import torch

from streamkl import reference
from streamkl.sparse import oracle_topk, sparse_attention

pytestmark = pytest.mark.usefixtures("small_blocks", "nan_poison")


@pytest.mark.parametrize("query_block", [1, 4, 7])
@pytest.mark.parametrize("seed", range(20))
def test_double_equals_the_reference(seed, query_block, sparse_case) -> None:
    case = sparse_case(seed)
    v = torch.randn(*case.k.shape[:-1], 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    indices = oracle_topk(case.q, case.k, topk=case.topk, query_block=query_block, **case.mask)
    expected = reference.sparse_attention(case.q, case.k, v, indices, query_block=query_block, **case.mask)
    out = sparse_attention(case.q, case.k, v, indices, query_block=query_block, **case.mask)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13, msg=str(case))


def test_a_backward_says_what_to_do() -> None:
    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    out = sparse_attention(q, q, q, torch.zeros(1, 8, 1).int())
    with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        out.sum().backward()
