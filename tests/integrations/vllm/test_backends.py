"""The sparse backends: what each overrides is what its class of vLLM's has, and the part for pages runs on CPU tensors.

No GPU is needed: nothing of vLLM's own kernels is called.
"""

import dataclasses
import importlib
import importlib.util
import inspect
from types import SimpleNamespace

import pytest
import torch

from streamkl.integrations.vllm import pages
from streamkl.integrations.vllm.backends import BACKENDS, sparse
from streamkl.integrations.vllm.metadata import Sequence
from streamkl.sparse import AttentionCall, IndexerSelector, IndexTensors, sparse_attention

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM has an environment of its own")
HEADS, KV_HEADS, DIM, SIZE, J, DI = 4, 2, 16, 32, 2, 8
SELECTOR = IndexerSelector(topk=24, query_block=8)


class Attends(sparse.SparseImpl):
    """The part of an implementation that is ours."""

    layout = pages.HalvedPages
    scale = 0.3


def cache_of(k: torch.Tensor, v: torch.Tensor, table: list[int], order: str) -> torch.Tensor:
    """A KV cache of seven pages of which a sequence has some, as vLLM's backends for GPUs write it."""
    both = torch.cat((k, v), -1)  # [n, heads, 2 * dim]
    cache = torch.full((7, SIZE, KV_HEADS, 2 * DIM), float("nan"))
    if order == "HND":
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    for n, page in enumerate(table):
        held = both[n * SIZE : (n + 1) * SIZE]
        cache[page, : len(held)] = held
    return cache.transpose(1, 2)


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("start", [0, 64])
def test_prompts_and_their_later_chunks_attend_to_selected_keys_in_either_layout(order: str, start: int) -> None:
    rng, length = torch.Generator().manual_seed(start), 150
    q, k, v = (torch.randn(length, heads, DIM, generator=rng) for heads in (HEADS, KV_HEADS, KV_HEADS))
    index = IndexTensors(
        torch.randn(J, length, DI, generator=rng), torch.randn(length, DI, generator=rng),
        torch.randn(length, J, generator=rng),
    )  # fmt: skip
    table = [5, 0, 3, 6, 1]
    kv_cache, index_keys = cache_of(k, v, table, order), torch.full((7, SIZE, DI), float("nan"))
    slots = torch.tensor(table)[:, None] * SIZE + torch.arange(SIZE)
    pages.write_index_keys(index_keys, slots.flatten()[:length], index.index_k)
    own = IndexTensors(index.index_q[:, start:], index.index_k[start:], index.index_w[start:])
    step = sparse.SparseStep([Sequence(0, start, length, torch.tensor(table))])
    out = torch.full((length - start, HEADS, DIM), float("nan"))
    Attends().attend(None, q[start:], k[start:], v[start:], kv_cache, step, out, SELECTOR, own, index_keys)

    whole = [x.transpose(0, 1)[None] for x in (q, k, v)]
    given = IndexTensors(index.index_q[None], index.index_k[None], index.index_w[None])
    selected = SELECTOR.select(AttentionCall(*whole[:2], 0.3, index=given))
    wanted = sparse_attention(*whole, selected, query_block=8, scale=0.3, backend="reference")[0].transpose(0, 1)
    torch.testing.assert_close(out, wanted[start:])


@needs_vllm
@pytest.mark.parametrize("dense", BACKENDS)
def test_what_a_backend_overrides_has_the_parameters_of_vllms(dense: str) -> None:
    module = importlib.import_module(BACKENDS[dense][1])
    backend = module.SparseBackend
    parts = (backend, backend.get_builder_cls(), backend.get_impl_cls())
    parents = [(part, next(c for c in part.__mro__ if c.__module__.startswith("vllm."))) for part in parts]
    assert parents[0][1].get_name() == dense
    assert backend.get_name() == BACKENDS[dense][0]
    overridden = 0
    for ours, theirs in parents:
        for name in ("get_name", "get_impl_cls", "get_builder_cls", "__init__", "build", "get_cudagraph_support"):
            one, other = getattr(ours, name, None), getattr(theirs, name, None)
            if one is None or other is None or getattr(one, "__func__", one) is getattr(other, "__func__", other):
                continue
            overridden += 1
            assert list(inspect.signature(one).parameters) == list(inspect.signature(other).parameters), (ours, name)
    assert overridden >= 4
    for needed in ("forward", "do_kv_cache_update"):
        assert callable(getattr(backend.get_impl_cls(), needed)), needed
    assert {f.name for f in dataclasses.fields(module.SparseMetadata)} >= {"sparse", "dense", "num_actual_tokens"}


@needs_vllm
@pytest.mark.parametrize("dense", ["FLASH_ATTN", "TRITON_ATTN"])
@pytest.mark.parametrize("decode", ["dense", "sparse"])
def test_only_steps_of_dense_decodes_may_be_cuda_graphs(dense: str, decode: str, monkeypatch) -> None:
    gpu = importlib.import_module("streamkl.integrations.vllm.backends.gpu")
    builder = importlib.import_module(BACKENDS[dense][1]).SparseBackend.get_builder_cls()
    monkeypatch.setattr(sparse, "settings_of", lambda config: SimpleNamespace(decode=decode))
    found = builder.get_cudagraph_support(SimpleNamespace(model_config=None), None)
    support = gpu.AttentionCGSupport
    assert found == (support.NEVER if decode == "sparse" else support.UNIFORM_SINGLE_TOKEN_DECODE)
    assert not builder.supports_update_block_table


@needs_vllm
def test_a_backend_that_none_extends_is_refused_in_a_sentence() -> None:
    from streamkl.integrations.vllm.backends import backend_for

    with pytest.raises(
        ValueError, match="sparse prefill extends vLLM's backends CPU_ATTN, FLASH_ATTN, TRITON_ATTN, and"
    ):
        backend_for("FLEX_ATTENTION")
