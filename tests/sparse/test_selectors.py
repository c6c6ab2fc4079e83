"""Selectors: every query keeps a key, and a budget of all keys is dense attention."""

import pytest
import torch

from streamkl import reference
from streamkl.sparse import (
    AttentionCall,
    IndexerSelector,
    IndexTensors,
    OracleSelector,
    RandomSelector,
    WindowSelector,
    sparse_attention,
)

pytestmark = pytest.mark.usefixtures("small_blocks", "nan_poison")
KINDS = {"oracle": OracleSelector, "indexer": IndexerSelector, "window": WindowSelector, "random": RandomSelector}


def call_of(case) -> AttentionCall:
    return AttentionCall(case.q, case.k, **case.mask, index=IndexTensors(case.index_q, case.index_k, case.index_w))


@pytest.mark.filterwarnings("ignore:a top-k of")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(24))
def test_a_budget_of_all_keys_is_dense_attention(seed, kind, sparse_case) -> None:
    case, query_block = sparse_case(seed), (1, 4, 9)[seed % 3]
    v = torch.randn_like(case.k)
    indices = KINDS[kind](topk=case.k.shape[-2 if not case.packed else 0], query_block=query_block).select(
        call_of(case)
    )
    out = sparse_attention(case.q, case.k, v, indices, query_block=query_block, **case.mask)
    allowed = case.allowed
    x = reference.logits(*((y.transpose(0, 1)[None] if case.packed else y) for y in (case.q, case.k)), None)
    p = x.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)
    values = v.transpose(0, 1)[None] if case.packed else v
    dense = p @ values.repeat_interleave(p.shape[1] // values.shape[1], 1)
    torch.testing.assert_close(out.transpose(0, 1)[None] if case.packed else out, dense, msg=str(case))


@pytest.mark.filterwarnings("ignore:a top-k of")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("topk", [1, 3, 8, 20])
def test_no_query_is_left_without_a_key(kind, topk) -> None:
    rng = torch.Generator().manual_seed(topk)
    q, k = torch.randn(2, 4, 50, 8, generator=rng), torch.randn(2, 2, 61, 8, generator=rng)
    index = IndexTensors(torch.randn(2, 1, 50, 4, generator=rng), torch.randn(2, 61, 4, generator=rng), None)
    for query_block in (1, 8, 16):
        indices = KINDS[kind](topk=topk, query_block=query_block).select(AttentionCall(q, k, index=index))
        rows = indices.repeat_interleave(query_block, 1)[:, :50]
        on = torch.arange(50)[:, None] + 11
        assert ((rows >= 0) & (rows <= on)).any(-1).all()
        own = torch.arange(0, 50, query_block)[:, None] + 11
        if query_block > 1:
            for n in range(min(topk, query_block)):
                inside = own[:, 0] + n < 61
                assert (indices[:, inside, n] == (own + n)[inside, 0]).all()


@pytest.mark.filterwarnings("ignore:a top-k of")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("topk", [1, 3, 5, 8, 9])
@pytest.mark.parametrize("left", [0, 2, 5, 40])
def test_with_a_window_exactly_the_queries_past_its_reach_are_left_without_a_key(kind, topk, left) -> None:
    """A full block has its first ``topk`` diagonals, and the last of them is seen by the ``left`` queries after it."""
    rng, query_block = torch.Generator().manual_seed(topk), 8
    q, k, v = (torch.randn(2, n, 40, 8, generator=rng) for n in (4, 2, 2))
    index = IndexTensors(torch.randn(2, 1, 40, 4, generator=rng), torch.randn(2, 40, 4, generator=rng), None)
    call = AttentionCall(q, k, window=(left, 0), index=index)
    indices = KINDS[kind](topk=topk, query_block=query_block).select(call)
    rows, on = indices.repeat_interleave(query_block, 1), torch.arange(40)[:, None]
    without = ~((rows >= 0) & (rows <= on) & (rows >= on - left)).any(-1)
    assert torch.equal(without, (torch.arange(40) % query_block >= topk + left).expand(2, 40))
    out = sparse_attention(q, k, v, indices, query_block=query_block, window=(left, 0))
    assert torch.equal((out == 0).all(-1).all(1), without)
    if topk >= query_block:
        assert (rows == on).any(-1).all()


def test_random_keys_are_drawn_once_and_alike() -> None:
    q = k = torch.randn(1, 2, 40, 8)
    one, other = (RandomSelector(12, 5).select(AttentionCall(q, k)) for _ in range(2))
    assert torch.equal(one, other)
    assert not torch.equal(one, RandomSelector(12, 5, seed=1).select(AttentionCall(q, k)))
    for n, row in enumerate(one[0].tolist()):
        keys = [key for key in row if key >= 0]
        assert len(set(keys)) == len(keys) == min(12, 5 * (n + 1))
        assert max(keys) < 5 * (n + 1), "a key that no query of the query block sees"


def test_a_window_selects_its_sinks_and_the_nearest_keys_that_its_queries_see() -> None:
    """The query block's own keys, sinks, those before it, the nearest first, and those after it."""
    q = k = torch.zeros(1, 1, 8, 4)
    selector = WindowSelector(topk=8, query_block=2, sinks=2)
    everything = selector.select(AttentionCall(q, k))[0].tolist()
    assert everything[2:] == [[4, 5, 0, 1, 3, 2, -1, -1], [6, 7, 0, 1, 5, 4, 3, 2]]
    near = selector.select(AttentionCall(q, k, causal=False, window=(3, 1)))[0].tolist()
    assert near[1:] == [[2, 3, 0, 1, 4, -1, -1, -1], [4, 5, 1, 3, 2, 6, -1, -1], [6, 7, 5, 4, 3, -1, -1, -1]]


def test_wrong_arguments_are_refused() -> None:
    q = torch.zeros(1, 1, 4, 4)
    with pytest.raises(ValueError, match="topk must be a positive integer: got 0"):
        OracleSelector(0, 1)
    with pytest.raises(ValueError, match="query_block must be a positive integer: got 0"):
        RandomSelector(1, 0)
    with pytest.raises(ValueError, match="sinks must be an integer and not negative: got -1"):
        WindowSelector(1, 1, sinks=-1)
    with pytest.raises(ValueError, match=r"call\.index must hold an indexer's tensors"):
        IndexerSelector(1, 1).select(AttentionCall(q, q))


@pytest.mark.parametrize("kind", KINDS)
def test_a_top_k_that_holds_only_the_diagonal_of_its_query_block_is_warned_of_at_the_callers_line(kind) -> None:
    for topk, query_block in ((8, 64), (64, 64)):
        message = (
            f"a top-k of {topk} keys shared by a query block of {query_block} holds only keys on the block's diagonal"
        )
        with pytest.warns(UserWarning, match=f"{message}: select more than {query_block} keys") as caught:
            KINDS[kind](topk=topk, query_block=query_block)
        assert [warning.filename for warning in caught] == [__file__]
    for topk, query_block in ((8, 1), (1, 1), (65, 64)):
        KINDS[kind](topk=topk, query_block=query_block)  # a warning would be an error
