"""``sparse_attention(sink=)``: a logit per head that belongs to no key, against a softmax with one column more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from streamkl import reference
from streamkl.sparse import sparse_attention

HEADS, KV_HEADS, TOKENS, KEYS, BLOCK = 4, 2, 13, 5, 4


def drawn(dtype: torch.dtype = torch.float64) -> tuple[Any, Tensor]:
    """``q``, ``k``, ``v`` and sinks, and selected keys: none for the first query block, one for the second."""
    rng = torch.Generator().manual_seed(0)
    shapes = ((2, HEADS, TOKENS, 8), (2, KV_HEADS, TOKENS, 8), (2, KV_HEADS, TOKENS, 6), (HEADS,))
    leaves = [torch.randn(shape, generator=rng).to(dtype).requires_grad_() for shape in shapes]
    blocks = -(-TOKENS // BLOCK)
    indices = torch.rand(2, blocks, TOKENS, generator=rng).argsort(-1)[..., :KEYS].int()
    indices[:, 0], indices[:, 1, 1:] = -1, -1
    indices[:, 1, 0] = 2
    return leaves, indices


def written_out(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, indices: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    seen = reference.selected_pairs(TOKENS, TOKENS, indices, BLOCK, True, None, None, None)
    logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    column = sink[:, None, None].expand(2, -1, TOKENS, 1)
    return torch.cat((logits, column), -1).softmax(-1)[..., :-1].nan_to_num(0.0) @ v


@pytest.mark.parametrize("engine", ["tiled", "reference", "auto"])
def test_output_and_gradients_are_those_of_a_softmax_with_a_column_more(engine: Any) -> None:
    leaves, indices = drawn()
    out, lse = sparse_attention(
        *leaves[:3], indices=indices, query_block=BLOCK, sink=leaves[3], return_lse=True, backend=engine
    )
    wanted = written_out(*leaves, indices=indices)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-13)
    assert not out[:, :, :BLOCK].any(), "rows without keys"
    _, without = sparse_attention(*leaves[:3], indices=indices, query_block=BLOCK, return_lse=True)
    assert torch.equal(lse, without) or engine == "reference", "the log-sum-exp is that of the keys"
    upstream = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(wanted, leaves, upstream)
    if engine != "reference":
        upstream[:, :, :BLOCK] = torch.nan  # what rows without keys are given is not read
    for found, grad in zip(torch.autograd.grad(out, leaves, upstream), expected, strict=True):
        torch.testing.assert_close(found, grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_of_minus_infinity_is_none_and_repeats_are_bit_equal(dtype: torch.dtype) -> None:
    (q, k, v, _), indices = drawn(dtype)
    none = torch.full((HEADS,), -torch.inf, requires_grad=True)
    out = sparse_attention(q, k, v, indices, query_block=BLOCK, sink=none)
    plain = sparse_attention(q, k, v, indices, query_block=BLOCK)
    assert torch.equal(out, plain)
    with torch.no_grad():
        assert torch.equal(
            sparse_attention(q, k, v, indices, query_block=BLOCK, sink=none),
            sparse_attention(q, k, v, indices, query_block=BLOCK),
        )
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = torch.autograd.grad(out, (q, k, v, none), upstream, retain_graph=True)
    assert not found[3].any()
    for x, y in zip(found, torch.autograd.grad(out, (q, k, v, none), upstream), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sink_learns_where_all_else_is_frozen(dtype: torch.dtype) -> None:
    leaves, indices = drawn(dtype)
    leaves[3] = leaves[3].detach().float().requires_grad_()  # of another dtype than the keys
    upstream = torch.randn(2, HEADS, TOKENS, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradients = []
    for frozen in (False, True):
        q, k, v = (x.detach() if frozen else x for x in leaves[:3])
        out = sparse_attention(q, k, v, indices, query_block=BLOCK, sink=leaves[3])
        gradients.append(torch.autograd.grad(out, leaves[3], upstream)[0])
    assert torch.equal(*gradients)


def test_head_groups_have_the_sinks_of_their_heads() -> None:
    (q, k, v, sink), indices = drawn()
    per_group = torch.stack((indices, indices.flip(0)), 1)  # [B, G, query_blocks, K]
    out = sparse_attention(q, k, v, per_group, query_block=BLOCK, sink=sink)
    for g, heads in enumerate((slice(0, 2), slice(2, 4))):
        part: Any = (q[:, heads], k[:, g : g + 1], v[:, g : g + 1], per_group[:, g])
        alone = sparse_attention(*part, query_block=BLOCK, sink=sink[heads])
        torch.testing.assert_close(out[:, heads], alone, rtol=0, atol=1e-14)


def test_it_compiles_in_one_graph() -> None:
    leaves, indices = drawn(torch.float32)

    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        return sparse_attention(q, k, v, indices, query_block=BLOCK, sink=sink)

    eager, compiled = attend(*leaves), torch.compile(attend, fullgraph=True, backend="aot_eager")(*leaves)
    assert torch.equal(eager, compiled)
    for x, y in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in (eager, compiled)), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("sink", "got"),
    [
        (torch.zeros(3), r"torch.float32 \[3\]"),
        (torch.zeros(1, HEADS), r"torch.float32 \[1, 4\]"),
        (torch.zeros(HEADS, dtype=torch.int64), r"torch.int64 \[4\]"),
        (torch.zeros(HEADS, device="meta"), r"torch.float32 \[4\] on meta"),
        (0.0, "float"),
    ],
)
def test_what_is_no_sink_is_refused(sink: Any, got: str) -> None:
    (q, k, v, _), indices = drawn()
    with pytest.raises(ValueError, match=rf"sink must be a tensor of \[4\] logits, one per head, on cpu: got {got}"):
        sparse_attention(q, k, v, indices, query_block=BLOCK, sink=sink)
