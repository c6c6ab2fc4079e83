"""Calls of several threads stay apart: each gives the same bits as alone."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import streamkl.integrations.transformers as skl
from streamkl.integrations.transformers.families import Inputs, family_of
from streamkl.sparse import IndexerSelector, OracleSelector
from streamkl.testing.threads import in_threads
from streamkl.testing.tiny_models import GROUPED_QUERY, tiny_model, tokens

LENGTHS = (24, 9, 17, 1, 30, 12, 21, 5)


def sparse_model(family: str, **options: Any) -> Any:
    """A model that selects few keys, by indexers."""
    model = tiny_model(family)
    indexers = skl.new_indexers(model, head_dim=8) if family in GROUPED_QUERY else None
    skl.sparsify(model, IndexerSelector(topk=4, query_block=1), indexers, decode="sparse", **options)
    return model


@pytest.mark.parametrize("calls", [12, pytest.param(200, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", ["llama", "deepseek_v32"])
def test_eight_threads_have_the_logits_that_each_call_has_alone(family, calls) -> None:
    model, inputs = sparse_model(family), []
    for n, length in enumerate(LENGTHS):
        ids = tokens(1 + n % 3, length, seed=n)
        mask = torch.ones_like(ids)
        mask[0, : length // 3] = n % 2  # some are padded
        inputs.append({"input_ids": ids, "attention_mask": mask})

    @torch.no_grad()
    def run(n: int) -> torch.Tensor:
        return model(**inputs[n]).logits

    in_threads(run, len(inputs), threads=8, calls=calls)


@pytest.mark.parametrize("family", ["llama", "glm_moe_dsa"])
def test_threads_with_caches_of_their_own_continue_their_own_text(family) -> None:
    model, inputs = sparse_model(family), [tokens(2, length + 3, seed=n) for n, length in enumerate(LENGTHS)]

    @torch.no_grad()
    def run(n: int) -> torch.Tensor:
        cache, ids = DynamicCache(config=model.config), inputs[n]
        return torch.cat([model(part, past_key_values=cache).logits for part in ids.split(ids.shape[1] - 2, 1)], 1)

    in_threads(run, len(inputs), threads=4, calls=12)


@pytest.mark.parametrize("family", ["llama", "deepseek_v32"])
def test_a_watcher_sees_the_calls_of_its_own_thread(family) -> None:
    model, inputs = sparse_model(family), [tokens(1, length, seed=n) for n, length in enumerate(LENGTHS)]
    seen: list[skl.Attended] = []

    @torch.no_grad()
    def run(n: int) -> torch.Tensor:
        mine: list[skl.Attended] = []
        with model.streamkl.watch(mine.append):
            model(inputs[n])
        assert [attended.layer for attended in mine] == [0, 1]
        return torch.cat([attended.call.index.index_k for attended in mine])

    with model.streamkl.watch(seen.append):
        in_threads(run, len(inputs), threads=4, calls=12)
    assert seen == []


def test_an_indexer_that_another_thread_has_begun_to_move_is_moved_whole(monkeypatch) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)  # it knows no such device
    model = tiny_model("llama")
    indexer = skl.new_indexers(model, head_dim=8).of(0)
    next(indexer.children()).to("meta")
    hidden, table = torch.empty(1, 5, 32, device="meta"), torch.empty(1, 5, 8, device="meta")
    family_of(model.config).project(indexer, Inputs(hidden, (table, table)))
    assert {parameter.device.type for parameter in indexer.parameters()} == {"meta"}


def test_watchers_may_end_in_any_order_and_copies_have_their_own() -> None:
    model, ids = sparse_model("llama"), tokens(1, 9)
    other, seen = copy.deepcopy(model), {"first": 0, "second": 0}

    def count(name: str) -> Callable[[skl.Attended], None]:
        return lambda attended: seen.update({name: seen[name] + 1})

    first, second = model.streamkl.watch(count("first")), model.streamkl.watch(count("second"))
    first.__enter__()
    second.__enter__()
    model(ids)
    other(ids)
    assert seen == {"first": 2, "second": 2}
    first.__exit__(None, None, None)
    model(ids)
    assert seen == {"first": 2, "second": 4}
    second.__exit__(None, None, None)
    model(ids)
    assert seen == {"first": 2, "second": 4}


@torch.no_grad()
def test_a_call_that_raises_between_hook_and_attention_leaves_nothing_behind() -> None:
    model, ids = sparse_model("llama"), tokens(1, 9)
    logits, attention = model(ids).logits, model.model.layers[1].self_attn

    def fail(module: torch.nn.Module, args: Any) -> None:
        raise RuntimeError("in the middle of a call")

    hook = attention.q_proj.register_forward_pre_hook(fail)
    before = dict(vars(attention.streamkl_layer))
    with pytest.raises(RuntimeError, match="in the middle of a call"):
        model(ids)
    assert vars(attention.streamkl_layer) == before
    hook.remove()
    model.set_attn_implementation("streamkl_oracle")
    skl.sparsify(model, OracleSelector(9, 1), model.streamkl.indexers)
    model(ids)
    skl.sparsify(model, IndexerSelector(4, 1), model.streamkl.indexers)
    assert torch.equal(model(ids).logits, logits)


@torch.no_grad()
def test_layers_of_one_model_may_run_inside_of_another_models_call() -> None:
    """A model that is called within another model's attention does not touch that call."""
    outer, inner, ids = sparse_model("llama"), sparse_model("llama"), tokens(1, 12)
    wanted, other = outer(ids).logits, inner(tokens(2, 7)).logits
    inside: list[torch.Tensor] = []
    hook = outer.model.layers[0].self_attn.q_proj.register_forward_hook(
        lambda *_: inside.append(inner(tokens(2, 7)).logits)
    )
    assert torch.equal(outer(ids).logits, wanted)
    assert torch.equal(inside[0], other)
    hook.remove()


@torch.no_grad()
def test_a_model_that_is_called_within_its_own_call_keeps_both_apart() -> None:
    model, ids, other = sparse_model("llama"), tokens(1, 12), tokens(2, 7)
    wanted, inside = [model(ids).logits, model(other).logits], []
    local = threading.local()

    def again(*_: Any) -> None:
        if not getattr(local, "inside", False):
            local.inside = True
            inside.append(model(other).logits)
            local.inside = False

    hook = model.model.layers[0].self_attn.q_proj.register_forward_hook(again)
    assert torch.equal(model(ids).logits, wanted[0])
    assert torch.equal(inside[0], wanted[1])
    hook.remove()
