"""Tiny random models in vLLM: all keys against vLLM's dense attention, selected keys against transformers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from streamkl.sparse import IndexerSelector

SELECTOR = IndexerSelector(topk=96, query_block=32)
ALL = {"kind": "indexer", "topk": 2304, "query_block": 32}
SOME = {"kind": "indexer", "topk": 96, "query_block": 32}
LENGTHS = (50, 64, 65, 100, 127, 128, 129, 200, 257, 300, 384, 450, 512, 601, 750, 900, 1000, 1290, 1700, 2000)
CLOSE = 1e-4
"""What log-probabilities of float32 may differ by, where nothing but the order of sums differs."""


def keys(indices: torch.Tensor) -> list[set[int]]:
    """The selected keys of each query block."""
    return [{key for key in row if key >= 0} for row in indices.tolist()]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_with_all_keys_it_is_vllms_dense_attention(family: str, tiny, engine, prompts) -> None:
    model, requests = tiny(family), prompts(*LENGTHS)
    dense = engine(model.path).generate(requests)
    sparse = engine(model.path, {"indexers": str(model.indexers), "selector": ALL}).generate(requests)
    assert max(a.difference(b) for a, b in zip(dense, sparse, strict=True)) < CLOSE


@pytest.mark.parametrize("heads", [1, 3])
def test_selected_keys_and_logprobs_are_those_of_transformers(heads: int, tiny, engine, prompts, reference) -> None:
    model = tiny("llama", heads)
    served = engine(model.path, {"indexers": str(model.indexers)})
    for prompt in prompts(129, 300, 1000):
        wanted, selected = reference(model, prompt, SELECTOR)
        with served.recording() as recorders:
            answer = served.generate([prompt], tokens=1)[0]
        same = total = 0
        for layer, recorder in enumerate(recorders):
            [(start, found)] = recorder.kept
            assert start == 0
            for ours, theirs in zip(keys(found), keys(selected[layer]), strict=True):
                same, total = same + len(ours & theirs), total + len(theirs)
        assert same / total >= 0.999
        for token, logprob in answer.logprobs[0].items():
            assert abs(logprob - float(wanted[-1, token])) < 1e-3


def test_fewer_keys_make_a_difference(tiny, engine, prompts) -> None:
    model, [prompt] = tiny(), prompts(1000)
    dense = engine(model.path).generate([prompt], tokens=1)[0]
    sparse = engine(model.path, {"indexers": str(model.indexers)}).generate([prompt], tokens=1)[0]
    assert sparse.difference(dense) > 0.01


@pytest.mark.parametrize("chunk", [256, 250, 100])
def test_a_prompt_in_chunks_is_the_prompt_in_one(chunk: int, tiny, engine, prompts) -> None:
    """250 and 100 are no multiples of a query block: chunks end before."""
    model, requests = tiny(), prompts(257, 601, 1000)
    settings = {"indexers": str(model.indexers)}
    whole = engine(model.path, settings).generate(requests, together=False)
    chunked = engine(model.path, settings, max_num_batched_tokens=chunk, max_num_seqs=8)
    with chunked.recording() as recorders:
        found = chunked.generate(requests, together=False)
    starts = recorders[0].kept
    assert len(starts) > len(requests)
    assert all(start % SELECTOR.query_block == 0 for start, _ in starts)
    assert max(a.difference(b) for a, b in zip(whole, found, strict=True)) < CLOSE


def test_prompts_mixed_with_decodes_are_the_prompts_one_by_one(tiny, engine, prompts) -> None:
    model, requests = tiny(), prompts(50, 601, 130, 1000, 75, 300)
    settings = {"indexers": str(model.indexers)}
    one_by_one = engine(model.path, settings).generate(requests, tokens=12, together=False)
    mixed = engine(model.path, settings, max_num_batched_tokens=200, max_num_seqs=8).generate(requests, tokens=12)
    assert max(a.difference(b) for a, b in zip(one_by_one, mixed, strict=True)) < CLOSE


def test_a_prompt_whose_prefix_is_cached_is_the_prompt_without_a_cache(tiny, engine, prompts) -> None:
    model, [first, other] = tiny(), prompts(1000, 300)
    second = [*first[:800], *other]
    settings = {"indexers": str(model.indexers)}
    alone = engine(model.path, settings).generate([second])[0]
    cached = engine(model.path, settings, enable_prefix_caching=True)
    cached.generate([first])
    found = cached.generate([second])[0]
    assert found.cached == 768, "six pages of 128 tokens"
    assert found.difference(alone) < CLOSE


def test_sparse_decode_with_all_keys_is_dense_decode(tiny, engine, prompts) -> None:
    model, requests = tiny(), prompts(50, 300, 601)
    dense = engine(model.path).generate(requests, tokens=12)
    settings = {"indexers": str(model.indexers), "selector": ALL, "decode": "sparse"}
    sparse = engine(model.path, settings).generate(requests, tokens=12)
    assert max(a.difference(b) for a, b in zip(dense, sparse, strict=True)) < CLOSE


def test_sparse_decode_selects_by_the_index_keys_of_all_tokens(tiny, engine, prompts) -> None:
    model, [prompt] = tiny(), prompts(300)
    served = engine(model.path, {"indexers": str(model.indexers), "decode": "sparse"})
    with served.recording() as recorders:
        served.generate([prompt], tokens=4)
    (_, whole), *decoded = recorders[0].kept
    assert len(whole) == 10
    assert [start for start, _ in decoded] == [300, 301, 302]
    for start, found in decoded:
        [selected] = keys(found)
        assert len(selected) == SELECTOR.topk
        assert start in selected, "a token sees itself"


@pytest.mark.parametrize("kind", ["oracle", "window"])
def test_selectors_without_an_indexer_are_served(kind: str, tiny, engine, prompts) -> None:
    model, requests = tiny(), prompts(300, 601)
    everything = {"selector": {"kind": kind, "topk": 2304, "query_block": 32}}
    dense = engine(model.path).generate(requests)
    sparse = engine(model.path, everything, max_num_batched_tokens=250, max_num_seqs=8).generate(requests)
    assert max(a.difference(b) for a, b in zip(dense, sparse, strict=True)) < CLOSE


def test_a_model_that_was_saved_sparse_needs_no_flag(tiny, engine, prompts, tmp_path) -> None:
    import json
    import shutil

    model, requests = tiny(), prompts(300, 601)
    by_flag = engine(model.path, {"indexers": str(model.indexers)}).generate(requests)
    shutil.copytree(model.path, tmp_path / "sparse")
    shutil.copytree(model.indexers, tmp_path / "sparse" / "streamkl")
    config = json.loads((tmp_path / "sparse" / "config.json").read_text())
    config["streamkl"] = {"selector": SOME, "decode": "dense", "indexers": "streamkl"}
    (tmp_path / "sparse" / "config.json").write_text(json.dumps(config))
    saved = engine(tmp_path / "sparse").generate(requests)
    assert [each.tokens for each in saved] == [each.tokens for each in by_flag]
    assert [each.logprobs for each in saved] == [each.logprobs for each in by_flag]


def test_a_model_without_settings_is_vllms_own(tiny, engine) -> None:
    from vllm.model_executor.models.llama import LlamaForCausalLM
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
    from vllm.v1.core.sched.scheduler import Scheduler

    served = engine(tiny().path)
    assert type(served.model) is LlamaForCausalLM
    assert type(served.core.scheduler) is Scheduler
    assert {type(layer.self_attn.attn.impl) for layer in served.model.model.layers} == {CPUAttentionBackendImpl}


def test_requests_that_are_cancelled_leave_no_pages_behind(tiny, engine, prompts) -> None:
    from vllm import SamplingParams

    model = tiny()
    served = engine(model.path, {"indexers": str(model.indexers)}, max_num_batched_tokens=200, max_num_seqs=8)
    pool = served.core.scheduler.kv_cache_manager.block_pool
    before = pool.get_num_free_blocks()
    llm = served.llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=6, detokenize=False, ignore_eos=True)
    names = []
    for n, prompt in enumerate(prompts(*(40 + 37 * n % 700 for n in range(24)))):
        names.append(llm.add_request(str(n), {"prompt_token_ids": prompt}, params))
    done = set()
    for step in range(400):
        done |= {out.request_id for out in llm.step() if out.finished}
        if step % 3 == 0 and step // 3 < 24 and step // 3 % 4 == 0:
            llm.abort_request([str(step // 3)])
        if not llm.has_unfinished_requests():
            break
    assert not llm.has_unfinished_requests()
    assert len(done) >= 18
    assert pool.get_num_free_blocks() == before


def test_normalise_of_the_folder_is_kept(tiny, tmp_path) -> None:
    from types import SimpleNamespace

    from streamkl.integrations.saved import folder
    from streamkl.integrations.saved.selectors import to_json
    from streamkl.integrations.vllm.settings import settings_of

    model = tiny()
    _, description = folder.read(model.indexers)
    description["selector"] = to_json(dataclasses.replace(SELECTOR, normalise=True))
    place = folder.write(tmp_path / "indexers", folder.read_weights(model.indexers), description)
    value = {"indexers": str(place), "selector": SOME}
    config = SimpleNamespace(
        hf_config=SimpleNamespace(streamkl=value), hf_overrides={"streamkl": value}, model="x", revision=None
    )
    settings = settings_of(config)
    assert settings is not None
    assert settings.selector == dataclasses.replace(SELECTOR, normalise=True)
