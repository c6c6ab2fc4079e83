"""The bare products are products: their sums are those of the matrices' elements that they stand for."""

import pytest
import torch
from torch import Tensor

from streamkl.bench.products import bare_products
from streamkl.engines import cpu
from streamkl.testing import Heads, make_case

pytestmark = pytest.mark.skipif(cpu.unsupported(torch.device("cpu")) is not None, reason="the CPU engine is not here")


def expected(q: Tensor, k: Tensor, distributions: int, causal: bool, block_q: int, block_k: int) -> Tensor:
    """For each distribution and block of rows, the last block first: the sum of each tile's last product."""
    group = q.shape[1] // distributions
    x = (q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT).unflatten(1, (-1, group)).sum(2)
    tokens = q.shape[2]
    x = torch.nn.functional.pad(x, (0, -tokens % block_k))
    sums = []
    for first in reversed(range(0, tokens, block_q)):
        last = min(first + block_q, tokens)
        ends = range(block_k, (last + block_k if causal else x.shape[-1] + 1), block_k)
        columns = [min(end, last) - 1 if causal else end - 1 for end in ends]
        sums.append(x[:, :, last - 1, columns].sum(-1))
    return torch.stack(sums, dim=-1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [Heads(2, 2, 2, 2), Heads(6, 2, 2, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [128, 150])
def test_every_tile_is_multiplied(tokens: int, dtype: torch.dtype, heads: Heads, causal: bool) -> None:
    case = make_case(heads=heads, dims=(40, 59), dtypes=(dtype, dtype), tokens=(tokens, tokens), guard=False)
    a_q, a_k, b_q, b_k = case.tensors.values()
    sums = bare_products(a_q, a_k, b_q, b_k, causal, block_q=32, block_k=64)()
    of_a = expected(a_q, a_k, heads.student, causal, 32, 64)
    of_b = expected(b_q, b_k, heads.student, causal, 32, 64)
    torch.testing.assert_close(sums.double(), (of_a + of_b).flatten(), rtol=1e-5, atol=1e-4)
