"""A pretrained model for the tests that need one, and what "to rounding" means for logits."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from streamkl.testing import smollm2

collect_ignore_glob = [] if importlib.util.find_spec("transformers") else ["test_*.py"]


class Dense(NamedTuple):
    """The dense model's logits, and how far its own roundings take them from those of float64."""

    logits: Tensor
    rounding: float

    def check(self, got: Tensor, wanted: Tensor | None = None) -> None:
        """Holds logits to the dense ones, or to others of the same model: both may err as the dense model errs."""
        error = float((got - (self.logits if wanted is None else wanted)).abs().max())
        assert error <= 2 * self.rounding, f"{error:.2e} is more than twice the model's own {self.rounding:.2e}"


@pytest.fixture
def dense_of() -> Callable[..., Dense]:
    """A function of a model and its inputs; the rounding is the larger one of two dense implementations."""

    @torch.no_grad()
    def run(model: Any, **inputs: Tensor) -> Dense:
        before = model.config.get_text_config()._attn_implementation
        model.set_attn_implementation("sdpa")
        exact = copy.deepcopy(model).double()(**inputs).logits
        logits = model(**inputs).logits
        model.set_attn_implementation("eager")
        errors = [float((each - exact).abs().max()) for each in (logits, model(**inputs).logits)]
        model.set_attn_implementation(before)
        return Dense(logits, max(errors) + torch.finfo(logits.dtype).eps * float(exact.abs().max()))

    return run


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
