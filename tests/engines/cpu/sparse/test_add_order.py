"""Query blocks that add to one dK and dV in a fixed order: the same bits with any number of threads."""

import pytest
import torch
from torch import Tensor

from streamkl.sparse import sparse_attention


def gradients(tensors: tuple[Tensor, ...], indices: Tensor, threads: int, **options) -> tuple[Tensor, ...]:
    torch.set_num_threads(threads)
    out = sparse_attention(*tensors, indices, query_block=64, backend="cpu", **options)
    return torch.autograd.grad(out, tensors, torch.ones_like(out))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_gradients_have_the_same_bits_with_any_number_of_threads(packed: bool, dtype: torch.dtype) -> None:
    """More threads than key heads, so that several add to the same keys; query blocks share some keys, not all."""
    rng, tokens = torch.Generator().manual_seed(0), 1100
    q, k, v = (torch.randn(1, heads, tokens, 40, generator=rng).to(dtype) for heads in (4, 2, 2))
    options, query_blocks = {}, -(-tokens // 64)
    if packed:
        cu = torch.tensor([0, 400, 410, 1100])
        options, query_blocks = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}, 7 + 1 + 11
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    indices = torch.rand(1, query_blocks, 400 if packed else tokens, generator=rng).argsort(-1)[..., :300]
    tensors = tuple(x.requires_grad_() for x in (q, k, v))
    before = torch.get_num_threads()
    try:
        alone = gradients(tensors, indices[0] if packed else indices, 1, **options)
        for threads in (2, 3, 64):
            for _ in range(3):
                found = gradients(tensors, indices[0] if packed else indices, threads, **options)
                assert all(torch.equal(x, y) for x, y in zip(found, alone, strict=True)), f"{threads} threads"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [256, 257, 600])
def test_query_blocks_of_more_rows_than_a_tile_are_cut(rows: int) -> None:
    """Tiles have at most 256 rows; a head group of seven leaves slots of one head each."""
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, rows, 16, generator=rng).requires_grad_() for heads in (7, 1, 1))
    indices = torch.arange(rows)[None, None]
    found, wanted = (
        torch.autograd.grad(sparse_attention(q, k, v, indices, query_block=rows, backend=backend).sum(), (q, k, v))
        for backend in ("cpu", "tiled")
    )
    for ours, tiled in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, tiled, rtol=1e-4, atol=1e-5)
