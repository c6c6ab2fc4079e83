"""MiniMax-M3, whose head groups select blocks of keys for themselves, sparse by ``sparsify``."""

from typing import Any

import pytest
import torch

import streamkl.integrations.transformers as skl
from streamkl.integrations.transformers.families.minimax_m3_vl import MiniMaxM3
from streamkl.sparse import IndexerSelector, OracleSelector
from streamkl.testing.tiny_models import OWN_INDEXERS, tiny_model

NAME, TOKENS, KEYS = "minimax_m3_vl", 30, 12
ROUTED = 1e-5
"""Experts are weighed in float32, whose rounding depends on how many tokens there are at a time."""
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.skipif(NAME not in OWN_INDEXERS, reason="this version of transformers does not have the model"),
]


@pytest.fixture
def model() -> Any:
    """In float64, with indexers whose scores differ: 3 blocks of 4 keys, the newest among them."""
    model = tiny_model(NAME).double()
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".indexer.q_proj" in name or ".indexer.k_proj" in name:
                weight.copy_(torch.randn(weight.shape, generator=rng).double())
    return model


def prompt(rows: int = 2) -> torch.Tensor:
    return torch.randint(5, 60, (rows, TOKENS), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_the_selected_keys_and_the_logits_are_those_of_transformers(model: Any) -> None:
    plain = model(prompt()).logits
    sparse = skl.sparsify(model)
    assert sparse.selector == IndexerSelector(KEYS, 1, activation=None)
    torch.testing.assert_close(model(prompt()).logits, plain, rtol=0, atol=1e-12)
    seen: list[Any] = []
    with sparse.watch(seen.append):
        model(prompt())
    assert [attended.layer for attended in seen] == [0, 1, 2]
    assert seen[0].indices is None, "the first layer has no indexer"
    assert seen[1].indices.shape == (2, 2, TOKENS, KEYS)
    groups = seen[1].indices[0, :, -1].sort().values
    assert not torch.equal(groups[0], groups[1]), "each group selects for itself"
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(prompt()).logits, plain)


@torch.no_grad()
def test_a_prompt_in_parts_with_a_cache_and_packed_sequences_have_the_logits_of_whole_prompts(model: Any) -> None:
    alone = [model(row[None, :length]).logits[0] for row, length in zip(prompt(), (TOKENS, 17), strict=True)]
    skl.sparsify(model)
    out = model(prompt()[:1, :11])
    for end in (12, 13, TOKENS):  # tokens one by one, and the rest at once
        start = out.past_key_values.get_seq_length()
        out = model(prompt()[:1, start:end], past_key_values=out.past_key_values)
        torch.testing.assert_close(out.logits[0], alone[0][start:end], rtol=0, atol=ROUTED)
    packed = torch.cat((prompt()[0], prompt()[1, :17]))[None]
    positions = torch.cat((torch.arange(TOKENS), torch.arange(17)))[None]
    logits = model(packed, position_ids=positions, use_cache=False).logits[0]
    torch.testing.assert_close(logits, torch.cat(alone), rtol=0, atol=ROUTED)
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, : TOKENS - 17] = 0  # on the left, where transformers would move the blocks
    ids = torch.stack((prompt()[0], torch.cat((prompt()[1, :1].expand(TOKENS - 17), prompt()[1, :17]))))
    padded = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    torch.testing.assert_close(padded[1, TOKENS - 17 :], alone[1], rtol=0, atol=ROUTED)


@torch.no_grad()
def test_other_selectors_select_in_all_layers_and_all_keys_are_dense_attention(model: Any) -> None:
    skl.sparsify(model, OracleSelector(TOKENS, 4))
    everything = model(prompt()).logits
    model.set_attn_implementation("streamkl_dense")
    torch.testing.assert_close(model(prompt()).logits, everything, rtol=0, atol=1e-12)
    skl.sparsify(model, IndexerSelector(TOKENS + 2, 1, activation=None))
    torch.testing.assert_close(model(prompt()).logits, everything, rtol=0, atol=1e-12)


@torch.no_grad()
def test_rows_of_the_batch_may_have_other_numbers_of_sequences(model: Any) -> None:
    ids = prompt()
    lengths = ((TOKENS,), (9, 12, TOKENS - 21))
    parts = [row.split(each) for row, each in zip(ids, lengths, strict=True)]
    alone = [torch.cat([model(part[None]).logits[0] for part in row]) for row in parts]
    skl.sparsify(model)
    positions = torch.stack([torch.cat([torch.arange(n) for n in each]) for each in lengths])
    packed = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed, torch.stack(alone), rtol=0, atol=ROUTED)


def test_a_query_block_and_probabilities_are_refused(model: Any) -> None:
    for selector in (IndexerSelector(KEYS, 4, None), IndexerSelector(KEYS, 1, None, normalise=True)):
        with pytest.raises(ValueError, match=f"the indexers of {MiniMaxM3.name} select for each query, by scores"):
            skl.sparsify(model, selector)


def test_gradients_of_all_weights_are_those_of_transformers(model: Any) -> None:
    """But of the indexers, which select under ``no_grad``."""
    found = []
    for sparse in (False, True):
        if sparse:
            skl.sparsify(model)
        model.train().zero_grad()
        model(prompt(), labels=prompt(), use_cache=False).loss.backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    plain, ours = found
    assert plain.keys() == ours.keys()
    assert sum(".q_proj" in name for name in ours) >= 3
    for name, grad in ours.items():
        torch.testing.assert_close(grad, plain[name], rtol=0, atol=1e-12 * max(1.0, float(plain[name].abs().max())))


@torch.no_grad()
def test_generation_with_a_static_cache_has_the_tokens_of_a_growing_one(model: Any) -> None:
    skl.sparsify(model)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    growing = model.generate(prompt(1), **options)
    assert torch.equal(model.generate(prompt(1), **options, cache_implementation="static"), growing)
