"""The sparse model runs wherever a model of transformers runs, and is the dense one again when told."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, pipeline

import streamkl.integrations.transformers as skl
from streamkl.indexer import rope_tables
from streamkl.integrations.transformers.selection import IMPLEMENTATIONS
from streamkl.sparse import IndexerSelector, OracleSelector, RandomSelector, WindowSelector
from streamkl.testing.tiny_models import FAMILIES, tiny_model, tokens

TOKENS = 24


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_back_to_sdpa_it_is_the_dense_model_bit_for_bit(family) -> None:
    model, ids = tiny_model(family), tokens(2, TOKENS)
    dense, names = model(ids).logits, list(model.state_dict())
    handle = skl.sparsify(model, OracleSelector(4, 2))
    sparse = model(ids).logits
    assert (sparse - dense).abs().max() > 0.01
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(ids).logits, dense)
    model.set_attn_implementation("streamkl_sparse")
    assert torch.equal(model(ids).logits, sparse)
    assert list(model.state_dict()) == names
    handle.remove()
    assert torch.equal(model(ids).logits, dense)
    assert not any(hasattr(module, "streamkl_layer") or module._forward_pre_hooks for module in model.modules())
    assert not hasattr(model, "streamkl")


@torch.no_grad()
def test_kv_heads_that_select_for_themselves_do_so_in_padded_batches_too() -> None:
    model, row = tiny_model("llama"), tokens(1, TOKENS)
    skl.sparsify(model, OracleSelector(6, 4))
    shared = model(row).logits
    handle = skl.sparsify(model, OracleSelector(6, 4, per_kv_head=True))
    seen = []
    with handle.watch(lambda attended: seen.append(attended.indices.shape)):
        alone = model(row).logits
    assert seen == [(1, 2, TOKENS // 4, 6)] * 2
    assert not torch.allclose(alone, shared, atol=1e-3)
    ids = torch.cat((torch.zeros(1, 3, dtype=torch.long), row), 1)
    mask = (torch.arange(TOKENS + 3) >= 3).long()[None]
    padded = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits[:, 3:]
    torch.testing.assert_close(padded, alone, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_other_names_select_as_many_keys_by_other_policies() -> None:
    model, ids = tiny_model("llama"), tokens(2, TOKENS)
    dense = model(ids).logits
    handle = skl.sparsify(model, IndexerSelector(6, 4), skl.new_indexers(model, head_dim=8))
    by_name = {}
    for name in IMPLEMENTATIONS:
        model.set_attn_implementation(name)
        by_name[name] = model(ids).logits
    for name, selector in (
        ("streamkl_oracle", OracleSelector(6, 4)), ("streamkl_window", WindowSelector(6, 4)),
        ("streamkl_random", RandomSelector(6, 4)),
    ):  # fmt: skip
        skl.sparsify(model, selector, handle.indexers)
        assert torch.equal(model(ids).logits, by_name[name])
    assert torch.equal(by_name["streamkl_dense"], dense)
    assert len({float(logits.sum()) for logits in by_name.values()}) == len(by_name)


@torch.no_grad()
def test_decoding_is_dense_unless_asked_otherwise() -> None:
    model, ids = tiny_model("llama"), tokens(1, TOKENS)
    counts: dict[str, list[int | None]] = {}
    for decode in (None, "sparse"):
        handle = skl.sparsify(model, OracleSelector(4, 2), decode=decode)
        seen = counts[str(decode)] = []

        def count(attended: skl.Attended, seen: list[int | None] = seen) -> None:
            seen.append(None if attended.indices is None else attended.indices.shape[1])

        with handle.watch(count):
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    query_blocks, layers = TOKENS // 2, 2
    assert counts["None"] == [query_blocks] * layers + [None] * 2 * layers
    assert counts["sparse"] == [query_blocks] * layers + [1] * 2 * layers


@torch.no_grad()
def test_a_watcher_sees_what_was_attended_to() -> None:
    model, ids = tiny_model("gemma3"), tokens(2, TOKENS)
    handle, seen = skl.sparsify(model, WindowSelector(6, 4), skl.new_indexers(model, head_dim=8)), []
    with handle.watch(seen.append):
        model(ids)
    model(ids)
    assert [attended.layer for attended in seen] == [1, 2], "the first layer has a window of its own"
    call = seen[0].call
    assert (call.q.shape, call.k.shape) == ((2, 4, TOKENS, 8), (2, 2, TOKENS, 8))
    assert call.scale == 8**-0.5
    assert (call.index.index_q.shape, call.index.index_k.shape) == ((2, 1, TOKENS, 8), (2, TOKENS, 8))
    assert (seen[0].indices.shape, seen[0].query_block) == ((2, TOKENS // 4, 6), 4)


@pytest.mark.parametrize(("family", "head_dim", "rotated"), [("llama", 4, 4), ("llama", 12, 8), ("qwen3_next", 8, 4)])
@torch.no_grad()
def test_an_indexers_head_is_rotated_as_a_head_of_its_width_would_be(family, head_dim, rotated) -> None:
    model, ids = tiny_model(family), tokens(2, TOKENS)
    indexers, hidden, seen = skl.new_indexers(model, head_dim=head_dim), [], []
    number = min(map(int, indexers))
    model.model.layers[number].input_layernorm.register_forward_hook(lambda module, args, out: hidden.append(out))
    with skl.sparsify(model, IndexerSelector(5, 1), indexers).watch(seen.append):
        model(ids)
    indexer = indexers.of(number)
    assert indexer.rope_dim == rotated
    wanted = indexer(hidden[0], position_embeddings=rope_tables(torch.arange(TOKENS), rotated, 10000.0))
    torch.testing.assert_close(seen[0].call.index.index_q, wanted.index_q)
    torch.testing.assert_close(seen[0].call.index.index_k, wanted.index_k)


@torch.no_grad()
def test_a_model_is_loaded_by_name(tmp_path) -> None:
    ids = tokens(2, TOKENS)
    dense = tiny_model("llama")
    dense.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="streamkl_window")
    assert (model.streamkl.selector.topk, model.streamkl.selector.query_block) == (2048, 64)
    assert model.config._attn_implementation == "streamkl_window"
    torch.testing.assert_close(model(ids).logits, dense(ids).logits)
    with pytest.raises(ValueError, match="nothing to select keys with"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="streamkl_sparse")


@torch.no_grad()
def test_a_selector_of_ones_own_selects() -> None:
    class Mine:
        topk, query_block = 4, 2

        def select(self, call):
            return OracleSelector(4, 2).select(call)

    model, ids = tiny_model("llama"), tokens(2, TOKENS)
    skl.sparsify(model, OracleSelector(4, 2))
    oracle = model(ids).logits
    handle = skl.sparsify(model, Mine())
    assert torch.equal(model(ids).logits, oracle)
    with pytest.raises(ValueError, match=r"only the selectors of streamkl\.sparse can be saved: got Mine"):
        handle.save_pretrained("nowhere")


@torch.no_grad()
def test_a_copy_of_a_model_has_indexers_of_its_own() -> None:
    model, ids = tiny_model("llama"), tokens(2, TOKENS)
    skl.sparsify(model, IndexerSelector(5, 1), skl.new_indexers(model, head_dim=8))
    logits, other = model(ids).logits, copy.deepcopy(model)
    assert torch.equal(other(ids).logits, logits)
    for parameter in other.streamkl.indexers.parameters():
        parameter.neg_()
    assert torch.equal(model(ids).logits, logits)
    assert not torch.equal(other(ids).logits, logits)
    other.streamkl.remove()
    assert torch.equal(model(ids).logits, logits)


@pytest.mark.slow
def test_generate_beam_search_and_a_pipeline_run_on_a_real_model(smol) -> None:
    model, tokenizer = smol
    prompt = "The secret number is 4821. The weather in Paris was fine. Again, the secret number is"
    skl.sparsify(model, OracleSelector(16, 4))
    inputs = tokenizer(prompt, return_tensors="pt")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    for beams in (1, 2):
        written = tokenizer.decode(model.generate(**inputs, num_beams=beams, **options)[0])
        assert "number is 4821" in written[len(prompt) - 12 :]
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    text = generator(prompt, max_new_tokens=6, do_sample=False)[0]["generated_text"]
    assert "4821" in text[len(prompt) :]
