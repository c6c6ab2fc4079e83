"""With enough keys sparse is dense, and padded, packed, cached and chunked calls are the plain call, on each family."""

import pytest
import torch
from transformers import Cache, DynamicCache, Qwen3_5Config, Qwen3_5ForConditionalGeneration, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer

import streamkl.integrations.transformers as skl
from streamkl.sparse import IndexerSelector, OracleSelector, RandomSelector, WindowSelector
from streamkl.testing.tiny_models import FAMILIES, GROUPED_QUERY, SPARSE_LATENT, tiny_model, tokens

TOKENS, BLOCK = 40, 8
LENGTHS = (24, TOKENS, 17)


def indexers_for(model, family: str):
    """Random ones; none for families that have their own."""
    return skl.new_indexers(model, head_dim=8) if family in GROUPED_QUERY else None


def pad(rows: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens ``[rows, longest]`` and their mask."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        at = slice(0, len(row)) if side == "right" else slice(ids.shape[1] - len(row), None)
        ids[i, at], mask[i, at] = row, 1
    return ids, mask


def in_chunks(model, ids: torch.Tensor, size: int) -> torch.Tensor:
    """The logits of one sequence that a model reads in chunks."""
    cache = DynamicCache(config=model.config)
    return torch.cat([model(chunk, past_key_values=cache).logits[0] for chunk in ids.split(size, 1)])


@pytest.mark.filterwarnings("ignore:a top-k of")
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_with_a_topk_of_all_keys_every_selector_is_the_dense_model(family, dense_of) -> None:
    everything = {"index_topk": TOKENS} if family in SPARSE_LATENT else {}
    model, ids = tiny_model(family, **everything), tokens(2, TOKENS)
    dense = dense_of(model, input_ids=ids)
    for selector in (
        OracleSelector(TOKENS, BLOCK), WindowSelector(TOKENS, BLOCK), RandomSelector(TOKENS, 1),
        IndexerSelector(TOKENS, BLOCK), OracleSelector(TOKENS, BLOCK, per_kv_head=True),
    ):  # fmt: skip
        skl.sparsify(model, selector, indexers_for(model, family))
        dense.check(model(ids).logits)
    skl.sparsify(model, OracleSelector(4, BLOCK))
    assert (model(ids).logits - dense.logits).abs().max() > 0.1, "fewer keys make a difference"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a top-k of")
@pytest.mark.parametrize("keys", [TOKENS, BLOCK])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_padded_packed_cached_and_chunked_calls_are_the_plain_call(family, keys, dense_of) -> None:
    rows = [tokens(length, seed=length) for length in LENGTHS]
    model = tiny_model(family)
    dense = dense_of(model, input_ids=rows[1][None])
    skl.sparsify(model, IndexerSelector(keys, BLOCK), indexers_for(model, family), decode="sparse")
    alone = [model(row[None]).logits[0] for row in rows]
    for side in ("left", "right"):
        ids, mask = pad(rows, side)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=mask, position_ids=positions).logits
        for got, seen, plain in zip(logits, mask.bool(), alone, strict=True):
            dense.check(got[seen], plain)
    dense.check(in_chunks(model, rows[1][None], 2 * BLOCK), alone[1])
    if family in ("qwen3_next", "qwen3_5"):
        return  # transformers packs their linear layers with flash-linear-attention alone
    together, ends = torch.cat(rows)[None], torch.tensor([0, *LENGTHS]).cumsum(0)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    told = {"cu_seq_lens_q": ends.int(), "cu_seq_lens_k": ends.int(), "max_length_q": TOKENS, "max_length_k": TOKENS}
    for options in ({"use_cache": False}, {"use_cache": False, **told}, {"use_cache": True, **told}):
        packed = model(together, position_ids=positions, **options).logits[0].split(LENGTHS)
        for got, plain in zip(packed, alone, strict=True):
            dense.check(got, plain)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
@torch.no_grad()
def test_full_attention_between_linear_layers_keeps_packed_sequences_apart(family, dense_of) -> None:
    model, positions = tiny_model(family), torch.cat([torch.arange(24), torch.arange(16)])[None]
    options = {"input_ids": tokens(1, TOKENS), "position_ids": positions, "use_cache": False}
    dense = dense_of(model, **options)
    skl.sparsify(model, OracleSelector(TOKENS, BLOCK))
    dense.check(model(**options).logits)
    assert (model(options["input_ids"]).logits - dense.logits).abs().max() > 0.1, "positions make a difference"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_positions_split_sequences_where_they_do_so_under_sdpa_and_nowhere_else(family, dense_of) -> None:
    everything = {"index_topk": TOKENS} if family in SPARSE_LATENT else {}
    model, ids, ramp = tiny_model(family, **everything), tokens(2, TOKENS), torch.arange(TOKENS)
    skl.sparsify(model, OracleSelector(TOKENS, BLOCK))
    for positions in (ramp + 10 * (ramp >= 20), torch.full_like(ramp, 3), ramp % 16):  # a gap, constant, packed
        found = []
        for options in ({}, {"use_cache": False}, {"attention_mask": torch.ones_like(ids), "use_cache": False}):
            inputs = {"input_ids": ids, "position_ids": positions[None], **options}
            dense = dense_of(model, **inputs)
            dense.check(model(**inputs).logits)
            found.append(dense.logits)
        assert (found[0] - found[1]).abs().max() > 0.1, "without a cache or a mask they split"


@pytest.mark.parametrize("positions", [[20, 21, 30, 31], [20, 20, 20, 20], [20, 21, 0, 1]])
@torch.no_grad()
def test_positions_of_tokens_that_continue_a_cache_split_nothing(positions, dense_of) -> None:
    model, ids = tiny_model("llama"), tokens(2, 24)
    skl.sparsify(model, OracleSelector(24, 4))
    dense, got = dense_of(model, input_ids=ids), {}
    for name in ("sdpa", "streamkl_sparse"):
        model.set_attn_implementation(name)
        cache = DynamicCache(config=model.config)
        model(ids[:, :20], past_key_values=cache)
        got[name] = model(ids[:, 20:], position_ids=torch.tensor([positions]), past_key_values=cache).logits
    dense.check(got["streamkl_sparse"], got["sdpa"])


@torch.no_grad()
def test_sequences_of_cu_seq_lens_split_a_row_unless_it_is_padded(dense_of) -> None:
    model, ids, cut = tiny_model("gemma3"), tokens(1, TOKENS), 17  # with dense layers between the sparse ones
    skl.sparsify(model, OracleSelector(TOKENS, BLOCK))
    dense, told = dense_of(model, input_ids=ids), {"cu_seq_lens_q": torch.tensor([0, cut, TOKENS], dtype=torch.int32)}
    positions = torch.cat([torch.arange(cut), torch.arange(TOKENS - cut)])[None]
    apart = model(ids, position_ids=positions, use_cache=False).logits
    mask = torch.ones_like(ids)
    for name in ("streamkl_sparse", "streamkl_dense"):
        model.set_attn_implementation(name)
        static = StaticCache(config=model.config, max_cache_len=TOKENS + 9)
        for options in ({}, {"use_cache": False}, {"attention_mask": mask}, {"past_key_values": static}):
            dense.check(model(ids, position_ids=positions, **told, **options).logits, apart)
    model.set_attn_implementation("streamkl_sparse")
    mask[0, :3] = 0
    padded = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    dense.check(model(**padded, **told).logits[:, 3:], dense_of(model, **padded).logits[:, 3:])


@torch.no_grad()
def test_padding_is_that_of_the_keys_which_a_cache_still_has(dense_of) -> None:
    model, (ids, mask) = tiny_model("llama"), pad([tokens(24), tokens(15, seed=2)], "left")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    skl.sparsify(model, OracleSelector(24, 4))
    dense = dense_of(model, input_ids=ids)
    for kind in ("static", "sliding"):
        got = {}
        for name in ("sdpa", "streamkl_sparse"):
            model.set_attn_implementation(name)
            if kind == "static":  # room for more
                cache = StaticCache(config=model.config, max_cache_len=40)
            else:  # the last 15 keys
                cache = Cache([DynamicSlidingWindowLayer(sliding_window=16) for _ in range(2)])
            parts = []
            for part in (slice(0, 20), slice(20, 24)):
                call = {"attention_mask": mask[:, : part.stop], "position_ids": positions[:, part]}
                parts.append(model(ids[:, part], past_key_values=cache, **call).logits)
            got[name] = torch.cat(parts, 1)[mask.bool()]
        dense.check(got["streamkl_sparse"], got["sdpa"])


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_greedy_tokens_do_not_depend_on_padding_or_on_chunks(family) -> None:
    rows = [tokens(length, seed=length) for length in LENGTHS]
    model = tiny_model(family)
    skl.sparsify(model, IndexerSelector(2 * BLOCK, BLOCK), indexers_for(model, family))
    options = {"max_new_tokens": 4, "do_sample": False}
    ids, mask = pad(rows, "left")
    together = model.generate(ids, attention_mask=mask, **options)[:, TOKENS:]
    for row, got in zip(rows, together, strict=True):
        alone = model.generate(row[None], attention_mask=torch.ones_like(row[None]), **options)[0, len(row) :]
        assert torch.equal(got, alone)
    ones = torch.ones_like(rows[1][None])
    chunked = model.generate(rows[1][None], attention_mask=ones, prefill_chunk_size=2 * BLOCK, **options)
    assert torch.equal(chunked[0, TOKENS:], together[1])


@pytest.mark.slow
@torch.no_grad()
def test_smollm2_sparse_with_enough_keys_is_dense_in_every_kind_of_call(smol, dense_of) -> None:
    model, tokenizer = smol
    texts = ["The capital of France is", "Once upon a time there was a king who had three daughters, and the youngest"]
    rows = [tokenizer(text, return_tensors="pt").input_ids[0] for text in texts]
    long = max(map(len, rows))
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    together = {"input_ids": torch.cat(rows)[None], "position_ids": positions, "use_cache": False}
    dense, alone = dense_of(model, **together), [model(row[None]).logits[0] for row in rows]
    written = [model.generate(row[None], attention_mask=torch.ones_like(row[None]), **options)[0] for row in rows]
    for selector in (OracleSelector(64, 8), WindowSelector(64, 8), RandomSelector(64, 8), IndexerSelector(64, 8)):
        indexers = skl.new_indexers(model) if isinstance(selector, IndexerSelector) else None
        skl.sparsify(model, selector, indexers)
        dense.check(model(rows[1][None]).logits[0], alone[1])
    for side in ("left", "right"):
        ids, mask = pad(rows, side)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=mask, position_ids=positions).logits
        for got, seen, plain in zip(logits, mask.bool(), alone, strict=True):
            dense.check(got[seen], plain)
    ids, mask = pad(rows, "left")
    for got, wanted in zip(model.generate(ids, attention_mask=mask, **options), written, strict=True):
        assert torch.equal(got[long - (len(wanted) - 5) :], wanted)
    dense.check(model(**together).logits)
    dense.check(model(**together).logits[0], torch.cat(alone))
    chunked = in_chunks(model, rows[1][None], 8)
    model.set_attn_implementation("sdpa")
    between = float((in_chunks(model, rows[1][None], 8) - alone[1]).abs().max())  # so far apart are dense ones
    dense._replace(rounding=max(dense.rounding, between)).check(chunked, alone[1])


@pytest.mark.filterwarnings("ignore:a top-k of")
@torch.no_grad()
def test_the_text_model_under_a_vision_model_is_sparse_and_images_are_seen(dense_of) -> None:
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 1, "num_position_embeddings": 16,
    }  # fmt: skip
    text = tiny_model("qwen3_5").config.to_dict()
    config = Qwen3_5Config(text_config=text, vision_config=vision, image_token_id=60, vision_start_token_id=58)
    model = Qwen3_5ForConditionalGeneration(config).eval()
    ids = tokens(1, TOKENS).clamp(max=50)
    ids[0, 3], ids[0, 4:8] = 58, 60
    image = {"pixel_values": torch.randn(16, 48), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    inputs = {"input_ids": ids, "mm_token_type_ids": (ids == 60).int(), **image}
    dense = dense_of(model, **inputs)
    assert sorted(skl.sparsify(model, OracleSelector(TOKENS, BLOCK)).layers) == [1, 2]
    dense.check(model(**inputs).logits)
    skl.sparsify(model, OracleSelector(4, BLOCK))
    assert (model(**inputs).logits - dense.logits).abs().max() > 0.01
