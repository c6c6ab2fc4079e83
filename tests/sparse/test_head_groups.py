"""Head groups that select keys for themselves: each has the attention and the oracle that it has alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from streamkl.sparse import AttentionCall, OracleSelector, oracle_topk, sparse_attention
from streamkl.sparse.head_groups import HeadGroups

BATCH, HEADS, KV_HEADS, TOKENS, DIM, TOPK = 2, 8, 4, 37, 16, 9


def drawn(dtype: torch.dtype = torch.float32) -> Any:
    rng = torch.Generator().manual_seed(0)
    shapes = ((BATCH, HEADS, TOKENS, DIM), (BATCH, KV_HEADS, TOKENS, DIM), (BATCH, KV_HEADS, TOKENS, 12))
    return [torch.randn(shape, generator=rng).to(dtype) for shape in shapes]


def alone(q: Tensor, k: Tensor, v: Tensor, groups: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The selection, the output and the log-sum-exp of each group by itself, joined."""
    parts = []
    for g in range(groups):
        heads: Any = [x[:, g * x.shape[1] // groups : (g + 1) * x.shape[1] // groups] for x in (q, k, v)]
        indices = oracle_topk(*heads[:2], topk=TOPK, query_block=options["query_block"])
        parts.append((indices, *sparse_attention(*heads, indices=indices, return_lse=True, **options)))
    indices, outputs, lses = zip(*parts, strict=True)
    return torch.stack(indices, 1), torch.cat(outputs, 1), torch.cat(lses, 1)


@pytest.mark.parametrize("query_block", [1, 8])
@pytest.mark.parametrize("groups", [2, 4])
def test_each_group_has_the_selection_the_attention_and_the_gradients_that_it_has_alone(groups, query_block) -> None:
    tensors: Any = [x.double().requires_grad_() for x in drawn()]
    options: dict[str, Any] = {"query_block": query_block}
    expected, out, lse = alone(*tensors, groups=groups, **options)
    indices = oracle_topk(*tensors[:2], topk=TOPK, groups=groups, **options)
    assert torch.equal(indices, expected)
    assert not torch.equal(indices[:, 0], indices[:, 1])
    ours, ours_lse = sparse_attention(*tensors, indices=indices, return_lse=True, **options)
    assert torch.equal(ours, out)
    assert torch.equal(ours_lse, lse)
    upstream = torch.randn_like(out)
    for x, y in zip(*(torch.autograd.grad(o, tensors, upstream) for o in (ours, out)), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_every_engine(backend: Any, dtype: torch.dtype) -> None:
    q, k, v = drawn(dtype)
    indices, out, _ = alone(q, k, v, KV_HEADS, query_block=4, backend=backend)
    assert torch.equal(sparse_attention(q, k, v, indices, query_block=4, backend=backend), out)


@pytest.mark.parametrize("end", [TOKENS, TOKENS - 5], ids=["whole", "with_tokens_past_the_last_sequence"])
@pytest.mark.parametrize("query_block", [1, 4])
def test_packed_sequences_have_what_they_have_in_batches_of_one(query_block, end) -> None:
    q, k, v = (x[0].transpose(0, 1) for x in drawn())  # [T, H, D]
    cu = torch.tensor([0, 11, end])
    options: dict[str, Any] = {"query_block": query_block, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    indices = oracle_topk(q, k, topk=TOPK, groups=KV_HEADS, **options)
    out, lse = sparse_attention(q, k, v, indices, return_lse=True, **options)
    assert out.shape == (TOKENS, HEADS, 12)
    assert not out[end:].any()
    first = 0
    for start, stop in ((0, 11), (11, end)):
        one: Any = [x[start:stop].transpose(0, 1)[None] for x in (q, k, v)]
        blocks = -(-(stop - start) // query_block)
        selected, expected, expected_lse = alone(*one, groups=KV_HEADS, query_block=query_block)
        assert torch.equal(indices[:, first : first + blocks], selected[0])
        torch.testing.assert_close(out[start:stop], expected[0].transpose(0, 1), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse[:, start:stop], expected_lse[0], rtol=1e-5, atol=1e-6)
        first += blocks


def test_the_oracle_selects_for_each_kv_head_by_the_mean_of_its_heads() -> None:
    q, k, _ = drawn()
    indices = OracleSelector(TOPK, 4, per_kv_head=True).select(AttentionCall(q, k))
    assert torch.equal(indices, oracle_topk(q, k, topk=TOPK, query_block=4, groups=KV_HEADS))
    assert indices.shape == (BATCH, KV_HEADS, 10, TOPK)


def test_a_given_log_sum_exp_is_that_of_each_group() -> None:
    from streamkl import attention_lse

    q, k, _ = drawn()
    lse = attention_lse(q, k, causal=True)
    assert torch.equal(oracle_topk(q, k, topk=TOPK, groups=2, lse=lse), oracle_topk(q, k, topk=TOPK, groups=2))
    packed: dict[str, Any] = {"cu_seqlens_q": torch.tensor([0, TOKENS]), "cu_seqlens_k": torch.tensor([0, TOKENS])}
    q, k = (x[0].transpose(0, 1) for x in (q, k))
    with_lse = oracle_topk(q, k, topk=TOPK, groups=2, lse=lse[0], **packed)
    assert torch.equal(with_lse, oracle_topk(q, k, topk=TOPK, groups=2, **packed))


def test_a_layout_is_undone_by_its_inverse() -> None:
    for packed, shape in ((False, (2, 6, 5, 3)), (True, (5, 6, 3))):
        groups, x = HeadGroups(3, packed), torch.randn(shape)
        assert torch.equal(groups.join(groups.split(x)), x)
        rows = torch.randn((6, 5) if packed else (2, 6, 5))
        assert torch.equal(groups.join_rows(groups.split_rows(rows)), rows)


def test_what_does_not_fit_is_refused() -> None:
    q, k, v = drawn()
    indices = torch.zeros(BATCH, 3, TOKENS, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="must divide the 8 heads of q: got 3"):
        sparse_attention(q, k, v, indices)
    with pytest.raises(ValueError, match="must divide the 4 heads of k: got 8"):
        oracle_topk(q, k, topk=2, groups=8)
    packed: dict[str, Any] = {"cu_seqlens_q": torch.tensor([0, TOKENS]), "cu_seqlens_k": torch.tensor([0, TOKENS])}
    with pytest.raises(ValueError, match="with a page_table there is one selection for all heads"):
        sparse_attention(q[0].mT, k, v, indices[0], **packed, page_table=torch.zeros(1, 3, dtype=torch.int32))
