"""A dry run: it costs what a batch of the run does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from streamkl.distillation import finetune, run
from streamkl.distillation.estimate import BATCHES, estimate
from streamkl.distillation.settings import FinetuneSettings
from streamkl.distillation.training import Prepared

BF16 = ["disable_tqdm=true", "bf16=true"]
KEYS: dict[str, Any] = {"topk": 20, "query_block": 8}


def dtypes_of(prepared: Prepared, found: list[torch.dtype]) -> Prepared:
    """Notes the dtype of each result of the first map of keys."""
    maps = (module for name, module in prepared.model.backbone.named_modules() if name.endswith("0.self_attn.k_proj"))
    next(maps).register_forward_hook(lambda module, inputs, result: found.append(result.dtype))
    return prepared


def test_it_multiplies_in_the_dtype_of_the_run(tiny: Any, llama: Path, prose: Path, tmp_path: Path) -> None:
    found: list[torch.dtype] = []
    settings = tiny.settings(llama, prose, tmp_path / "run", set=BF16)
    said = estimate(settings, lambda: dtypes_of(run.prepare(settings), found))
    assert found == BATCHES * [torch.bfloat16]
    assert "2 indexers, by 12 steps of 2 x 96 tokens" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_it_runs_layers_as_often_as_the_run(
    tiny: Any, llama: Path, prose: Path, tmp_path: Path, checkpointing: bool
) -> None:
    found: list[torch.dtype] = []
    indexers = run.distill(tiny.settings(llama, prose, tmp_path / "distilled", steps=1, **KEYS)).indexers
    settings = FinetuneSettings(
        model=str(llama), text=[str(prose)], output=str(tmp_path / "run"), length=96, device="cpu",
        indexers=str(indexers), checkpointing=checkpointing, **KEYS,
    )  # fmt: skip
    estimate(settings, lambda: dtypes_of(finetune.prepare(settings), found))
    assert len(found) == BATCHES * (2 if checkpointing else 1)
