"""The frozen model and what learns from it: the same model, the right loss, linear memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from streamkl.bench import distill as bench
from streamkl.bench.gate import RedGateError
from streamkl.testing.memory import counted_peak


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
    small.distiller(ids, backward=torch.Tensor.backward)
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


def test_gradients_layer_by_layer_have_the_bits_of_one_backward_after_the_forward(small: bench.Bench) -> None:
    small.ready(bench.STEP)
    ids, weight = small.ids(100).view(2, 50), torch.rand(2, 50)
    kept: list[torch.Tensor] = []
    small.distiller(ids, weight, backward=kept.append)
    together = torch.autograd.grad(torch.stack(kept).sum() / 3, list(small.distiller.indexers.parameters()))
    loss = small.distiller(ids, weight, backward=lambda loss: loss.backward(torch.ones_like(loss) / 3))["loss"]
    assert loss == sum(kept)
    assert not loss.requires_grad
    for parameter, gradient in zip(small.distiller.indexers.parameters(), together, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)
    small.optimizer.zero_grad()


def peak_memory(layers: int, tokens: int, tiny: Any, folder: Path) -> int:
    """The most bytes that tensors take in a step, over what they take before it, gradients included."""
    model = bench.Bench(str(tiny.llama(folder / str(layers), num_hidden_layers=layers)), heads=2, head_dim=16)
    model.ready(bench.STEP)
    ids = model.ids(tokens)
    model.distiller(ids, backward=torch.Tensor.backward)
    model.optimizer.step()
    model.optimizer.zero_grad(set_to_none=False)

    def step() -> None:
        model.distiller(ids, backward=torch.Tensor.backward)
        model.optimizer.step()

    return counted_peak(step)


@pytest.mark.slow
def test_the_memory_of_a_step_does_not_grow_with_the_layers_and_as_the_length(tiny: Any, tmp_path: Path) -> None:
    few, many = (peak_memory(layers, 1024, tiny, tmp_path) for layers in (8, 32))
    long = peak_memory(8, 2048, tiny, tmp_path)
    print(f"{few:,} bytes with 8 layers, {many:,} with 32; {long:,} with twice the length")
    assert many < 1.1 * few
    assert long < 2.1 * few
