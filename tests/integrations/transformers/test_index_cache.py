"""Index keys stay beside the keys of the cache, whatever is done to it."""

import copy

import pytest
import torch
from transformers import DynamicCache

import streamkl.integrations.transformers as skl
from streamkl.sparse import IndexerSelector
from streamkl.testing.causal_models import tiny_causal_model
from streamkl.testing.tiny_models import tiny_model, tokens

TOKENS, KEYS = 24, 5


@pytest.fixture(params=["llama", "qwen3_next", "deepseek_v32"])
def model(request: pytest.FixtureRequest):
    """It selects few keys in every call, so that a wrong index key shows."""
    model = tiny_model(request.param)
    indexers = None if request.param == "deepseek_v32" else skl.new_indexers(model, head_dim=8)
    skl.sparsify(model, IndexerSelector(KEYS, 1), indexers, decode="sparse")
    return model


def read(model, ids: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    return cache


def after(model, cache: DynamicCache, ids: torch.Tensor) -> torch.Tensor:
    """The logits of more tokens."""
    return model(ids, past_key_values=cache).logits


@torch.no_grad()
def test_whatever_is_done_to_a_cache_is_done_to_its_index_keys(model, dense_of) -> None:
    ids, more = tokens(3, TOKENS), tokens(3, 4, seed=2)
    whole = torch.cat((ids, more), 1)
    plain = model(whole).logits[:, -4:]
    dense = dense_of(model, input_ids=whole)

    def check(cache: DynamicCache, rows: list[int]) -> None:
        dense.check(after(model, cache, more[rows]), plain[rows])

    check(read(model, ids), [0, 1, 2])
    check(copy.deepcopy(read(model, ids)), [0, 1, 2])
    reordered = read(model, ids)
    reordered.reorder_cache(torch.tensor([2, 0, 0]))
    check(reordered, [2, 0, 0])
    again = read(model, tokens(3, TOKENS, seed=3))
    again.reset()
    model(ids, past_key_values=again)
    check(again, [0, 1, 2])
    if "linear_attention" in (getattr(model.config, "layer_types", None) or ()):
        return  # a linear layer's state has no rows to repeat, and no tokens to take away
    repeated = read(model, ids)
    repeated.batch_repeat_interleave(2)
    check(repeated, [0, 0, 1, 1, 2, 2])
    repeated.batch_select_indices(torch.tensor([4, 1]))
    repeated.crop(-4)
    check(repeated, [2, 0])


@torch.no_grad()
def test_layers_that_attend_to_the_keys_of_others_are_cropped_with_them() -> None:
    model, ids = tiny_causal_model("gemma3n_text", sliding_window=64).eval(), tokens(2, TOKENS)
    skl.sparsify(model, IndexerSelector(KEYS, 1), skl.new_indexers(model, head_dim=8), decode="sparse")
    cache = read(model, ids)
    whole = after(model, cache, tokens(2, 4, seed=2))
    cache.crop(0)
    cache.crop(-4)
    torch.testing.assert_close(after(model, cache, tokens(2, 4, seed=2)), whole)


@torch.no_grad()
def test_beam_search_with_a_cache_writes_what_it_writes_without(model) -> None:
    ids = tokens(2, TOKENS)
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with_cache = model.generate(ids, use_cache=True, **options)
    assert torch.equal(with_cache, model.generate(ids, use_cache=False, **options))
    model.set_attn_implementation("sdpa")
    assert not torch.equal(with_cache, model.generate(ids, **options)), "few keys make a difference"


@torch.no_grad()
def test_a_cache_that_was_filled_otherwise_is_refused() -> None:
    model, ids = tiny_model("llama"), tokens(2, TOKENS)
    cache = read(model, ids)
    skl.sparsify(model, IndexerSelector(KEYS, 1), skl.new_indexers(model, head_dim=8))
    with pytest.raises(ValueError, match="layer 0 of the cache has 24 keys but 0 index keys: it was filled without"):
        after(model, cache, ids)
    cache = read(model, ids)
    cache.layers[0].keys, cache.layers[0].values = cache.layers[0].keys[:, :, :9], cache.layers[0].values[:, :, :9]
    with pytest.raises(ValueError, match="layer 0 of the cache has 9 keys but 24 index keys"):
        after(model, cache, ids)


@torch.no_grad()
def test_a_static_cache_has_room_for_more_keys_than_there_are() -> None:
    model, ids = tiny_model("llama"), tokens(2, TOKENS)
    skl.sparsify(model, IndexerSelector(KEYS, 1), skl.new_indexers(model, head_dim=8), decode="sparse")
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    static = model.generate(ids, cache_implementation="static", disable_compile=True, **options)
    assert torch.equal(static, model.generate(ids, **options))
