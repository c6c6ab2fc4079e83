"""Sizes of models from their configs, against the models themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from streamkl.plan.model import Model, of_config, read

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"


def tiny(family: str, **options: Any) -> Any:
    """The config of a tiny model, and the model without storage."""
    transformers = pytest.importorskip("transformers")
    from streamkl.testing.tiny_models import COMMON, EXPERTS, OPTIONS

    name, own = {**OPTIONS, "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "num_experts": 4})}[family]
    kind = {"Gemma3": "Gemma3TextConfig", "Qwen3_5": "Qwen3_5TextConfig"}.get(name, f"{name}Config")
    return getattr(transformers, kind)(**{**COMMON, **own, **options})


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gemma3", "deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_those_of_the_model_and_of_its_own_indexers(family: str, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    config = tiny(family, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    indexers = sum(p.numel() for name, p in model.named_parameters() if ".indexer." in name)
    found = of_config(config.to_dict())
    assert found.weights == sum(p.numel() for p in model.parameters()) - indexers
    if found.index_heads:
        assert found.learning * found.indexer_weights(found.index_heads, found.index_dim) == indexers


@pytest.mark.parametrize("heads", [1, 3])
def test_weights_of_new_indexers_are_those_that_are_made(heads: int) -> None:
    from transformers import AutoModelForCausalLM

    from streamkl.distillation import Settings
    from streamkl.distillation.indexers import make_indexers
    from streamkl.integrations.transformers.families import family_of

    config = tiny("gemma3")
    model = AutoModelForCausalLM.from_config(config)
    settings = Settings(model="none", text=["none"], output="none", heads=heads, head_dim=8)
    made = sum(p.numel() for p in make_indexers(model, family_of(config), settings).parameters())
    found = of_config(config.to_dict())
    assert found.learning * found.indexer_weights(heads, 8) == made


def test_published_sizes_are_those_that_their_authors_state() -> None:
    stated = {"qwen3-30b-a3b": (30.5e9, 3.3e9), "deepseek-v3.2": (671e9, 37e9)}
    for name, (weights, active) in stated.items():
        model = read(CONFIGS / f"{name}.json")
        assert model.weights == pytest.approx(weights, rel=0.005)
        assert model.active + 2 * model.embedding == pytest.approx(active, rel=0.05)


def test_a_folder_and_a_nested_config_are_read(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "qwen3-30b-a3b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "outer", "text_config": config}))
    found = read(tmp_path)
    assert isinstance(found, Model)
    assert found == read(CONFIGS / "qwen3-30b-a3b.json")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold names and values"),
        ("{}", "must have num_hidden_layers, a number above 0: got None"),
        (
            '{"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "layer_types": ["linear_attention"]}',
            "has layers of linear_attention",
        ),
    ],
)
def test_configs_that_the_formulas_are_not_for_are_refused(tmp_path: Path, written: str, message: str) -> None:
    (tmp_path / "config.json").write_text(written)
    with pytest.raises(ValueError, match=message):
        read(tmp_path)
    with pytest.raises(ValueError, match="give the folder of a model"):
        read(tmp_path / "nowhere")
