"""The frozen teacher's attention: output and log-sum-exp are SDPA's, with more keys than queries too."""

import pytest
import torch
from torch.nn import functional

from streamkl import dense_attention
from streamkl.dense_attention import causal_attention


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


def test_queries_without_a_key_are_refused() -> None:
    with pytest.raises(ValueError, match="every query must see a key: got 3 queries and 2 keys"):
        causal_attention(torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8))
