"""A pretrained model for the tests that need one, and what "to rounding" means for logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from streamkl.testing import smollm2


@pytest.fixture
def same_to_rounding() -> Callable[..., None]:
    """A function of logits and the dense model's: it may err as much again as the dense model itself errs.

    ``exact`` are the dense model's in float64. What is compared with ``dense`` is any logits of the same tokens.
    """

    def check(got: Tensor, dense: Tensor, exact: Tensor, wanted: Tensor | None = None) -> None:
        rounding = (dense - exact).abs().max() + torch.finfo(dense.dtype).eps * exact.abs().max()
        error = (got - (dense if wanted is None else wanted)).abs().max()
        assert error <= 2 * rounding, f"{error:.2e} is more than twice the model's own {rounding:.2e}"

    return check


@pytest.fixture(scope="session")
def _smol() -> tuple[Any, Any]:
    return smollm2.load()


@pytest.fixture
def smol(_smol: tuple[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """SmolLM2-135M-Instruct, dense, and its tokenizer."""
    yield _smol
    model = _smol[0]
    if hasattr(model, "streamkl"):
        model.streamkl.remove()
    model.set_attn_implementation("sdpa")
