"""Families with indexers of their own, trained in place."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from streamkl.distillation.run import distill

PLAIN = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert torch.isfinite(model(torch.arange(40)[None]).logits).all()
assert "streamkl" not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_own_indexers_halve_their_kl_in_a_hundred_steps_and_the_model_loads_without_us(
    tiny: Any, prose: Path, tmp_path: Path, family: str
) -> None:
    model, run = getattr(tiny, family)(tmp_path / "model"), tmp_path / "run"
    options = {"steps": 100, "lr": 1e-2, "save_every": 100, "log_every": 20}
    with pytest.raises(ValueError, match="has indexers of its own: head_dim, init cannot be chosen"):
        distill(tiny.settings(model, prose, run, init="teacher", **options))
    result = distill(tiny.settings(model, prose, run, head_dim=64, **options))
    lines = [json.loads(line) for line in (run / "curves.jsonl").read_text().splitlines()]
    first, last = lines[0], lines[-1]
    print(family, {name: (first[name], last[name]) for name in ("kl", "recall", "mass")})
    assert last["kl"] <= first["kl"] / 2
    assert last["recall"] > first["recall"]
    assert result.model is not None
    before, after = (load_file(folder / "model.safetensors") for folder in (model, result.model))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(".indexer." in name for name in changed)
    assert {name: x.dtype for name, x in before.items()} == {name: x.dtype for name, x in after.items()}
    if family == "glm_moe_dsa":  # one process is enough to show it
        subprocess.run([sys.executable, "-c", PLAIN, str(result.model)], check=True)


def test_a_model_that_no_run_wrote_is_not_replaced_by_the_trained_one(tiny: Any, prose: Path, tmp_path: Path) -> None:
    model = tiny.deepseek_v32(tmp_path / "model")
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    with pytest.raises(ValueError, match=r"model is there already and was not written by a run"):
        distill(tiny.settings(model, prose, tmp_path, steps=1, head_dim=64))
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    assert not (tmp_path / "settings.json").exists()
