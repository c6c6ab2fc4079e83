"""The frozen model and what learns from it: the same model, the right loss, linear memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from streamkl.bench import distill as bench
from streamkl.bench.gate import RedGateError


@pytest.fixture(scope="module")
def small(llama: Path) -> bench.Bench:
    """A tiny model with two weighted heads."""
    return bench.Bench(str(llama), heads=2, head_dim=16)


def test_the_frozen_model_computes_what_it_computes_and_gets_no_gradients(small: bench.Bench) -> None:
    ids = small.ids(100)
    outputs = {}
    for name in (bench.FORWARD, bench.STEP):
        small.ready(name)
        with torch.no_grad():
            outputs[name] = small.backbone.base_model(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(outputs[bench.STEP], outputs[bench.FORWARD])
    small.distiller(ids)["loss"].backward()
    indexers = {id(p) for p in small.distiller.indexers.parameters()}
    with_gradients = {id(p) for p in small.distiller.parameters() if p.grad is not None}
    assert with_gradients == indexers
    small.optimizer.zero_grad()


def test_the_loss_is_that_of_the_matrices_and_a_wrong_one_shows_no_figure(
    small: bench.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.check()
    right = bench.materialised_kl
    monkeypatch.setattr(bench, "materialised_kl", lambda *args, **options: 1.05 * right(*args, **options))
    with pytest.raises(RedGateError, match="the losses at 512 tokens are"):
        small.check()


def test_what_a_backward_keeps_grows_as_the_length(small: bench.Bench) -> None:
    small.ready(bench.STEP)
    kept = {}
    for tokens in (256, 512):
        seen: dict[int, int] = {}

        def pack(x: Any, seen: dict[int, int] = seen) -> Any:
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = small.distiller(small.ids(tokens))["loss"]
        kept[tokens] = sum(seen.values())
        del loss
    print(kept)
    assert kept[512] <= 2.1 * kept[256]
