"""Batches of several threads stay apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from streamkl.bench import distill as bench
from streamkl.distillation.layer import UNDER_WAY
from streamkl.testing.threads import in_threads


@pytest.fixture(scope="module")
def small(llama: Path) -> bench.Bench:
    """A tiny model with two weighted heads."""
    return bench.Bench(str(llama), heads=2, head_dim=16)


def test_threads_have_the_losses_and_gradients_that_each_batch_has_alone(small: bench.Bench) -> None:
    batches = [small.ids(tokens) for tokens in (40, 9, 64, 23)]
    weights = [None, torch.rand(1, 9), torch.rand(1, 64), None]
    parameters = list(small.distiller.indexers.parameters())

    def run(n: int) -> torch.Tensor:
        gradients: list[torch.Tensor] = []

        def backward(loss: torch.Tensor) -> None:
            found = torch.autograd.grad(loss, parameters, allow_unused=True)  # those of the loss's own layer
            gradients.extend(gradient.flatten() for gradient in found if gradient is not None)

        loss = small.distiller(batches[n], weights[n], backward)["loss"]
        return torch.cat([loss.flatten(), *gradients])

    in_threads(run, len(batches), threads=4, calls=12)


def test_a_batch_that_fails_leaves_nothing_behind(small: bench.Bench) -> None:
    def fail(module: torch.nn.Module, args: object) -> None:
        raise RuntimeError("in the middle of a batch")

    loss = small.distiller(small.ids(30))["loss"]
    hook = small.backbone.model.layers[1].self_attn.q_proj.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle of a batch"):
        small.distiller(small.ids(12))
    assert UNDER_WAY.get() is None
    hook.remove()
    assert torch.equal(small.distiller(small.ids(30))["loss"], loss)
