"""Memory that a plan predicts, against what real steps allocate in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from streamkl.plan import Run
from streamkl.plan.memory import memory
from streamkl.plan.model import of_config
from streamkl.testing.memory import counted_peak


def step_of(config: Any, heads: int, dim: int) -> tuple[Any, Any]:
    """A distillation step of a model with random weights in float32, and its model."""
    from transformers import AutoModelForCausalLM

    from streamkl.distillation import Settings
    from streamkl.distillation.indexers import make_indexers
    from streamkl.distillation.model import Distiller
    from streamkl.integrations.transformers.families import family_of

    backbone = AutoModelForCausalLM.from_config(config)
    settings = Settings(model="none", text=["none"], output="none", heads=heads, head_dim=dim)
    if getattr(config, "index_n_heads", None):
        settings = Settings(model="none", text=["none"], output="none")
    model = Distiller(backbone, family_of(config), make_indexers(backbone, family_of(config), settings))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def step(ids: torch.Tensor) -> None:
        model(ids, backward=torch.Tensor.backward)
        optimizer.step()

    step(torch.zeros(1, 16, dtype=torch.long))  # gradients and the optimizer's state are resident
    return step, model


def compared(config: Any, run: Run) -> float:
    """What a step allocates at its peak, relative to what the plan predicts."""
    step, _ = step_of(config, run.index_heads, run.index_dim)
    ids = torch.randint(config.vocab_size, (run.batch, run.tokens), generator=torch.Generator().manual_seed(0))
    counted = counted_peak(lambda: step(ids))
    predicted = memory(of_config(config.to_dict()), run)
    print(f"{counted:,} bytes counted, {predicted.step:,} predicted in the moment of {predicted.moment}")
    return counted / predicted.step


def smollm2(**options: Any) -> Any:
    """The config of SmolLM2 cut to two layers."""
    from transformers import LlamaConfig

    from streamkl.testing.smollm2 import CONFIG

    return LlamaConfig(**{**CONFIG, "num_hidden_layers": 2, **options})


@pytest.mark.nightly
def test_the_peak_of_a_step_of_smollm2_at_8192_tokens_is_predicted_within_15_percent() -> None:
    pytest.importorskip("transformers")
    assert 0.85 < compared(smollm2(), Run(8192, dtype="float32")) < 1.15


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "run"),
    [
        ({"intermediate_size": 64}, Run(512, dtype="float32", index_heads=1)),
        ({"intermediate_size": 64}, Run(512, dtype="float32", index_heads=16)),
        ({"intermediate_size": 64}, Run(256, 2, dtype="float32", index_heads=4)),
        ({"num_hidden_layers": 1}, Run(512, dtype="float32", index_heads=4)),
        ({"num_hidden_layers": 4, "intermediate_size": 4096}, Run(256, 2, dtype="float32")),
    ],
    ids=["rotation", "loss", "batch", "one layer", "mlp"],
)
def test_the_peak_is_predicted_in_every_moment_of_a_layer(options: dict[str, Any], run: Run) -> None:
    pytest.importorskip("transformers")
    assert 0.85 < compared(smollm2(**options), run) < 1.15
