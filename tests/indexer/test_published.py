"""The calls of ``docs/indexer.md`` against the losses that papers describe, written out in float64."""

import pytest
import torch
from torch import Tensor

from streamkl import attention_kl, indexer_kl
from streamkl.indexer import HeadIndexer, LightningIndexer

TOKENS, WIDTH = 40, 24
VISIBLE = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def attention(q: Tensor, k: Tensor, mask: Tensor = VISIBLE) -> Tensor:
    """Every head's attention, ``[B, H, N, N]``."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf).softmax(-1)


def divergence(p: Tensor, scores: Tensor, mask: Tensor = VISIBLE) -> Tensor:
    """The mean over rows of ``KL(p || softmax(scores))``."""
    log_q = scores.masked_fill(~mask, -torch.inf).log_softmax(-1)
    return torch.where(mask & (p > 0), p * (p.log() - log_q), 0.0).sum(-1).mean()


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_deepseek_v32_and_glm_5_sum_over_heads_and_normalise(layout) -> None:
    hidden, latent, q, k = (
        randn(2, TOKENS, WIDTH),
        randn(2, TOKENS, 10),
        randn(2, 6, TOKENS, 16),
        randn(2, 6, TOKENS, 16),
    )
    indexer = LightningIndexer(WIDTH, query_dim=10, heads=3, head_dim=8, rope_dim=4, rope_layout=layout).double()
    summed = attention(q, k).sum(1)
    target = summed / summed.abs().sum(-1, keepdim=True)
    index_q, index_k, index_w = indexer(hidden, latent)
    scores = torch.einsum("bnj,bjnm->bnm", index_w, (index_q @ index_k[:, None].mT * 8**-0.5).relu())
    torch.testing.assert_close(indexer.loss(hidden, q, k, query=latent), divergence(target, scores))


def test_deepseek_v32_renormalises_over_the_selected_keys() -> None:
    hidden, q, k = randn(1, TOKENS, WIDTH), randn(1, 6, TOKENS, 16), randn(1, 6, TOKENS, 16)
    indexer = LightningIndexer(WIDTH, heads=3, head_dim=8, rope_dim=4).double()
    chosen = indexer.topk(hidden, 7)
    mask = torch.zeros(1, TOKENS, TOKENS + 1, dtype=torch.bool)
    mask = mask.scatter_(-1, torch.where(chosen < 0, TOKENS, chosen).long(), True)[..., :-1] & VISIBLE
    dense = attention(q, k).mean(1) * mask
    restricted = attention(q, k, mask[:, None]).mean(1)  # the model's own attention is over these keys by now
    assert not torch.allclose(dense / dense.sum(-1, keepdim=True), restricted)
    expected = divergence(restricted, indexer.scores(hidden), mask)
    torch.testing.assert_close(indexer.loss(hidden, q, k, topk_indices=chosen), expected)


def test_msa_has_a_target_per_group() -> None:
    q, k, index_q, index_k = (
        randn(1, 8, TOKENS, 16),
        randn(1, 2, TOKENS, 16),
        randn(1, 2, TOKENS, 8),
        randn(1, 1, TOKENS, 8),
    )
    target = attention(q, k).unflatten(1, (2, 4)).mean(2)
    loss = attention_kl(q, k, index_q, index_k, causal=True)
    torch.testing.assert_close(loss, divergence(target, index_q @ index_k.mT * 8**-0.5))


def test_clsa_takes_the_mean_over_layers_and_heads() -> None:
    hidden, layers, k = randn(1, TOKENS, WIDTH), [randn(1, 8, TOKENS, 16) for _ in range(3)], randn(1, 2, TOKENS, 16)
    target = torch.stack([attention(q, k).mean(1) for q in layers]).mean(0)
    indexer = HeadIndexer(WIDTH, head_dim=8, activation=None).double()
    shared_q = torch.stack([q.unflatten(1, (2, 4)) for q in layers], dim=2).flatten(1, 3)
    torch.testing.assert_close(indexer.loss(hidden, shared_q, k), divergence(target, indexer.scores(hidden)))


def test_spotattention_compares_the_head_mean_with_a_mean_of_index_heads() -> None:
    q, k, index_q, index_k = (
        randn(1, 8, TOKENS, 16),
        randn(1, 2, TOKENS, 16),
        randn(1, 4, TOKENS, 8),
        randn(1, TOKENS, 8),
    )
    scores = (index_q @ index_k[:, None].mT * 8**-0.5).mean(1)
    loss = indexer_kl(q, k, index_q, index_k, activation=None, index_scale=8**-0.5 / 4)
    torch.testing.assert_close(loss, divergence(attention(q, k).mean(1), scores))


def test_the_oracle_paper_collapses_the_heads() -> None:
    hidden, q, k = randn(1, TOKENS, WIDTH), randn(1, 9, TOKENS, 16), randn(1, 3, TOKENS, 16)
    indexer = HeadIndexer(WIDTH, head_dim=8).double()
    expected = divergence(attention(q, k).mean(1), indexer.scores(hidden))
    torch.testing.assert_close(indexer.loss(hidden, q, k), expected)


def test_an_absorbed_mla_teacher_is_one_key_head() -> None:
    """Scores of ``[nope, rope]`` heads equal those of absorbed queries over the latent key."""
    latent, rope_k, up = randn(1, TOKENS, 20), randn(1, TOKENS, 4), randn(6, 20, 12)
    nope_q, rope_q = randn(1, 6, TOKENS, 12), randn(1, 6, TOKENS, 4)
    nope_k = torch.einsum("bnc,hcd->bhnd", latent, up)
    q, k = torch.cat((nope_q, rope_q), -1), torch.cat((nope_k, rope_k[:, None].expand(1, 6, TOKENS, 4)), -1)
    absorbed_q = torch.cat((torch.einsum("bhnd,hcd->bhnc", nope_q, up), rope_q), -1)
    absorbed_k = torch.cat((latent, rope_k), -1)[:, None]
    index_q, index_k = randn(1, 2, TOKENS, 8), randn(1, TOKENS, 8)
    expected = indexer_kl(q, k, index_q, index_k)
    torch.testing.assert_close(indexer_kl(absorbed_q, absorbed_k, index_q, index_k, teacher_scale=16**-0.5), expected)
