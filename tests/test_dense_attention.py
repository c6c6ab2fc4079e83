"""The frozen teacher's attention: output and log-sum-exp are SDPA's, with more keys than queries too."""

import pytest
import torch
from torch.nn import functional

from streamkl import dense_attention
from streamkl.dense_attention import causal_attention, compressed_attention, merged, window_attention, with_rest


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    output = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return output, (q @ k.mT * scale).masked_fill(~mask, -torch.inf).logsumexp(-1)


@pytest.mark.parametrize("tokens", [(40, 40), (13, 40), (1, 40), (0, 5)], ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (24, 16), (8, 20)], ids=str)
def test_output_and_lse_are_those_of_sdpa_over_the_keys_up_to_each_querys_own(tokens, heads, dims) -> None:
    rng = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, n, t, d, generator=rng, dtype=torch.float64)
        for n, t, d in zip((heads[0], heads[1], heads[1]), (*tokens, tokens[1]), (dims[0], *dims), strict=True)
    )
    for ours, theirs in zip(causal_attention(q, k, v, 0.3), expected(q, k, v, 0.3), strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


def test_in_bfloat16_the_merged_output_errs_by_a_rounding_more_at_most() -> None:
    rng = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, t, 16, generator=rng).bfloat16() for t in (64, 200, 200))
    output, lse = causal_attention(q, k, v)
    exact, exact_lse = expected(*(x.double() for x in (q, k, v)), 0.25)
    assert output.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    torch.testing.assert_close(output.double(), exact, rtol=0, atol=2 * 2**-8 * exact.abs().max().item())
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=1e-4)


@pytest.mark.parametrize("tokens", [(40, 40), (13, 40)], ids=str)
def test_on_other_devices_the_mask_is_aligned_bottom_right_and_the_lse_takes_a_pass(tokens) -> None:
    rng = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 2, t, 16, generator=rng, dtype=torch.float64) for t in (*tokens, tokens[1]))
    for ours, theirs in zip(dense_attention._on_device(q, k, v, 0.3), expected(q, k, v, 0.3), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


@pytest.mark.parametrize("tokens", [(40, 40), (13, 40), (600, 700), (0, 5)], ids=str)
@pytest.mark.parametrize("window", [1, 7, 300])
def test_in_a_window_output_and_lse_are_those_of_sdpa_over_the_last_keys_of_each_query(tokens, window) -> None:
    rng = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(1, n, t, 16, generator=rng, dtype=torch.float64)
        for n, t in zip((4, 2, 2), (*tokens, tokens[1]), strict=True)
    )
    output, lse = window_attention(q, k, v, window, 0.3)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    ones = torch.ones(*tokens, dtype=torch.bool)
    mask = ones.tril(tokens[1] - tokens[0]) & ~ones.tril(tokens[1] - tokens[0] - window)
    exact = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(output, exact, rtol=0, atol=1e-14)
    exact = (q @ k.mT * 0.3).masked_fill(~mask, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(lse, exact, rtol=0, atol=1e-14)


def test_queries_without_a_key_are_refused() -> None:
    with pytest.raises(ValueError, match="every query must see a key: got 3 queries and 2 keys"):
        causal_attention(torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8))


@pytest.mark.parametrize("tokens", [24, 25, 26, 2])
@pytest.mark.parametrize("key_span", [3, 4])
def test_compressed_keys_are_seen_from_their_last_token_on(key_span: int, tokens: int) -> None:
    rng, keys = torch.Generator().manual_seed(3), tokens // key_span
    shapes = ((2, 4, tokens, 16), (2, 2, keys, 16), (2, 2, keys, 12))
    q, k, v = (torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes)
    output, lse = compressed_attention(q, k, v, key_span, 0.3)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    hidden = (torch.arange(keys) + 1) * key_span > torch.arange(tokens)[:, None] + 1
    logits = (q @ k.mT * 0.3).masked_fill(hidden, -torch.inf)
    torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=0, atol=1e-14)
    torch.testing.assert_close(output, logits.softmax(-1).nan_to_num(0.0) @ v, rtol=0, atol=1e-14)
    if keys:  # rows that see none of them keep what they have
        other, other_lse = causal_attention(q, q, q, 0.3)
        both, both_lse = merged(other[..., :12], other_lse, output, lse)
        first = slice(0, key_span - 1)
        assert torch.equal(both[:, :, first], other[:, :, first, :12])
        assert torch.equal(both_lse[:, :, first], other_lse[:, :, first])


def test_the_gradient_of_a_rest_with_a_small_share_keeps_its_digits() -> None:
    lse, rest = torch.tensor([20.0, 3.0, -20.0]), torch.zeros(3, requires_grad=True)
    (ours,) = torch.autograd.grad(with_rest(torch.ones(3, 1), lse, rest).sum(), rest)
    lse = lse.double()
    torch.testing.assert_close(ours.double(), -torch.sigmoid(lse) * torch.sigmoid(-lse), rtol=1e-6, atol=0)
