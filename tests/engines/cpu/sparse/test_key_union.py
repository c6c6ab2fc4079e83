"""Unions of neighbouring queries' keys: each query still attends only to its own keys."""

import pytest
import torch
from torch import Tensor

from streamkl.sparse import sparse_attention
from streamkl.testing import check_sparse_attention
from streamkl.testing.sparse_cases import MASK, SparseCase

TOKENS, SELECTED, HEADS = 150, 24, (6, 2)


def drifting_indices(query_block: int = 1, apart: int = 3) -> Tensor:
    """``[1, query_blocks, K]``: a query block selects ``apart`` keys of its own, and all select the others."""
    rng = torch.Generator().manual_seed(0)
    query_blocks = -(-TOKENS // query_block)
    common = torch.randperm(TOKENS // 2, generator=rng)[: SELECTED - apart].expand(query_blocks, -1)
    own = TOKENS // 2 + torch.rand(query_blocks, TOKENS // 2, generator=rng).argsort(-1)[:, :apart]
    return torch.cat([common, own], -1)[None].int()


def case_of(dtype: torch.dtype, indices: Tensor, query_block: int = 1, **mask) -> SparseCase:
    rng = torch.Generator().manual_seed(1)
    heads, kv_heads = HEADS
    q, k, v = (torch.randn(1, n, TOKENS, 40, generator=rng).to(dtype) for n in (heads, kv_heads, kv_heads))
    masks = {**dict.fromkeys(MASK), "causal": True, **mask}
    return SparseCase(0, q, k, v, (q, k[:, 0], None), indices, query_block, SELECTED, None, masks, None)


def case_of_several_tiles(dtype: torch.dtype, group: int, queries: int, keys: int) -> SparseCase:
    """Each query selects 300 keys, and a tile has 256; logits rise far along the keys."""
    rng = torch.Generator().manual_seed(2)
    k, v = (torch.randn(1, 2, keys, 64, generator=rng) for _ in range(2))
    q = torch.randn(1, 2 * group, queries, 64, generator=rng)
    k = k * torch.linspace(1.0, 12.0, keys)[:, None]
    indices = torch.rand(queries, keys, generator=rng).argsort(-1)[:, :300]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    masks = {**dict.fromkeys(MASK), "causal": False}
    return SparseCase(0, q, k, v, (q, k[:, 0], None), indices[None].int(), 1, 300, None, masks, None)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("query_block", [1, 3, 16])
@pytest.mark.parametrize("mask", [{}, {"causal": False}, {"window": (20, -1)}], ids=["causal", "full", "window"])
@pytest.mark.parametrize("apart", [0, 3, SELECTED])
def test_neighbours_with_and_without_keys_in_common(dtype, query_block, mask, apart) -> None:
    case = case_of(dtype, drifting_indices(query_block, apart), query_block, **mask)
    assert check_sparse_attention(case, backend="cpu").worst <= 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", [1, 3])
def test_unions_of_more_than_a_tile(dtype, group) -> None:
    """Some queries have none of their keys in the first tiles."""
    case = case_of_several_tiles(dtype, group, queries=700, keys=700)
    case.indices[:, ::5] = torch.where(case.indices[:, ::5] < 550, -1, case.indices[:, ::5])
    errors = check_sparse_attention(case, backend="cpu")
    assert errors.worst <= 1, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_single_rows_of_more_than_a_tile(dtype, group) -> None:
    """Without gradients, queries that share few keys, which float products then take one by one."""
    case = case_of_several_tiles(dtype, group, queries=16, keys=3000)
    errors = check_sparse_attention(case, backend="cpu", gradients=False)
    assert errors.worst <= 1, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_a_value_that_is_not_finite_reaches_only_the_query_that_selected_it(dtype, number, packed) -> None:
    """In the second of a batch, or of packed sequences whose keys do not start where their queries do."""
    key, query = 149, 149
    one = case_of(dtype, drifting_indices())
    indices = torch.where(one.indices == key, -1, one.indices).repeat(2, 1, 1)
    q, k, v = (x.repeat(2, 1, 1, 1) for x in (one.q, one.k, one.v))

    def attend(indices: Tensor, v: Tensor) -> Tensor:
        """``[2, heads, tokens, dim]``."""
        if not packed:
            return sparse_attention(q, k, v, indices, backend="cpu")
        ends_q, ends_k = torch.tensor([0, 40, TOKENS + 40]), torch.tensor([0, TOKENS, 2 * TOKENS])
        first, rest = sparse_attention(
            torch.cat([q[0, :, :40], q[1]], 1).transpose(0, 1), k.transpose(0, 1).flatten(1, 2).transpose(0, 1),
            v.transpose(0, 1).flatten(1, 2).transpose(0, 1), torch.cat([indices[0, :40], indices[1]]), causal=True,
            cu_seqlens_q=ends_q.int(), cu_seqlens_k=ends_k.int(), backend="cpu",
        ).transpose(0, 1).split([40, TOKENS], 1)  # fmt: skip
        return torch.stack([torch.cat([first, first.new_zeros(HEADS[0], TOKENS - 40, 40)], 1), rest])

    clean = attend(indices, v)
    indices[1, query, -1], v[1, :, key, 3] = key, number
    out = attend(indices, v)
    assert not out[1, :, query, 3].isfinite().any()
    out[1, :, query] = clean[1, :, query]
    torch.testing.assert_close(out, clean)


def test_a_query_without_keys_among_others_that_have_them_gives_zero() -> None:
    indices = drifting_indices()
    indices[0, [3, 70]] = -1
    case = case_of(torch.bfloat16, indices)
    out = sparse_attention(case.q, case.k, case.v, indices, backend="cpu")
    assert not out[0, :, [3, 70]].any()
    assert check_sparse_attention(case, backend="cpu").worst <= 1


def test_keys_that_are_hidden_from_a_query_may_hold_anything() -> None:
    indices = drifting_indices()
    key = 149  # which only the last query may see
    indices[0, :, -1] = torch.where((indices[0] == key).any(-1), indices[0, :, -1], key)
    case = case_of(torch.bfloat16, indices)
    clean = sparse_attention(case.q, case.k, case.v, indices, backend="cpu")
    case.k[0, :, key] = torch.nan
    out = sparse_attention(case.q, case.k, case.v, indices, backend="cpu")
    torch.testing.assert_close(out[:, :, :key], clean[:, :, :key])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("query_block", [1, 16, 64])
@pytest.mark.parametrize(
    ("wrong", "message"), [(TOKENS, "keys from 0 to 149, or -1"), (-2, "keys from 0 to 149, or -1"), (None, "twice")]
)
@pytest.mark.parametrize("rising", [False, True], ids=["any_order", "rising"])
def test_wrong_indices_are_refused(dtype, query_block, wrong, message, rising) -> None:
    indices = drifting_indices(query_block).to(dtype)
    indices[0, 1, 5] = indices[0, 1, 0] if wrong is None else wrong
    if rising:
        indices = indices.sort(-1).values
    case = case_of(torch.bfloat16, indices, query_block)
    with pytest.raises(ValueError, match=message):
        sparse_attention(case.q, case.k, case.v, indices, query_block=query_block, backend="cpu")


@pytest.mark.parametrize("query_block", [1, 16])
@pytest.mark.parametrize("window", [None, (40, 0)], ids=str)
def test_rows_of_rising_keys_attend_to_the_same_keys(query_block, window) -> None:
    """They are copied as they lie, with those that no row of the query block sees left out."""
    indices = drifting_indices(query_block)
    indices[0, 1, 3:] = -1
    case = case_of(torch.float32, indices, query_block)
    options = {"query_block": query_block, "window": window, "backend": "cpu"}
    last = torch.iinfo(indices.dtype).max
    rising = torch.where(indices < 0, last, indices).sort(-1).values
    found = sparse_attention(case.q, case.k, case.v, torch.where(rising == last, -1, rising), **options)
    assert torch.equal(found, sparse_attention(case.q, case.k, case.v, indices, **options))


def test_a_key_beyond_32_bits_is_refused() -> None:
    indices = drifting_indices().long()
    indices[0, 1, 5] = 1 << 32
    case = case_of(torch.bfloat16, indices)
    with pytest.raises(ValueError, match="keys from 0 to 149"):
        sparse_attention(case.q, case.k, case.v, indices, backend="cpu")
