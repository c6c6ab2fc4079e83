"""Models without a family file are distilled as those with one: plain, and with a fused projection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import streamkl.integrations.transformers as skl
from streamkl.distillation.run import distill

SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


OTHERS: dict[str, dict[str, Any]] = {
    # Sinks, and a window in every other layer.
    "gpt_oss": {
        "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 16, "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention"], "max_position_embeddings": 131072,
    }
}  # fmt: skip
"""Other settings of configs."""


def saved(tiny: Any, model_type: str, folder: Path, **options: Any) -> Path:
    config_class: Any = CONFIG_MAPPING[model_type]
    return tiny.save(folder, config_class(vocab_size=tiny.VOCABULARY, **{**SMALL, **options}))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen2", "phi3", "gpt_oss"])
def test_indexers_of_a_structural_model_learn_and_the_sparse_model_loads_back(
    tiny: Any, prose: Path, tmp_path: Path, model_type: str
) -> None:
    model, run = saved(tiny, model_type, tmp_path / "model", **OTHERS.get(model_type, {})), tmp_path / "run"
    settings = tiny.settings(model, prose, run, steps=25, lr=1e-2, log_every=24, save_every=25, query_block=4)
    result = distill(settings)
    lines = [json.loads(line) for line in (run / "curves.jsonl").read_text().splitlines()]
    print(model_type, [line["kl"] for line in lines])
    assert lines[-1]["kl"] < 0.85 * lines[0]["kl"]
    dense = AutoModelForCausalLM.from_pretrained(model)
    sparse = skl.sparsify(dense, indexers=result.indexers)
    assert sparse.family.name == "structural"
    sparse.save_pretrained(tmp_path / "sparse")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "sparse")
    ids = torch.arange(1, 81)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, dense(ids).logits)
        named = AutoModelForCausalLM.from_pretrained(model, attn_implementation="streamkl_oracle")
        dense.set_attn_implementation("sdpa" if dense._supports_sdpa else "eager")
        expected = dense(ids).logits
        error = (named(ids).logits - expected).abs().max() / expected.abs().max()  # of 2,048 keys, all
        assert error <= 32 * torch.finfo(torch.float32).eps
        assert not torch.equal(loaded(ids).logits, dense(ids).logits), "it is sparse"


@pytest.mark.parametrize(
    ("model_type", "message"),
    [("phi3", "init='teacher' needs maps of queries and keys"), ("cohere", "heads that are rotated in halves")],
)
def test_what_weights_of_the_teacher_cannot_be_taken_from_is_refused(
    tiny: Any, prose: Path, tmp_path: Path, model_type: str, message: str
) -> None:
    model = saved(tiny, model_type, tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        distill(tiny.settings(model, prose, tmp_path / "run", steps=1, init="teacher"))


def test_a_model_with_a_soft_cap_is_refused_before_text_is_read_or_weights_are_loaded(
    tiny: Any, tmp_path: Path
) -> None:
    model = saved(tiny, "gemma2", tmp_path / "model", head_dim=16)
    with pytest.raises(ValueError, match="layer 0 of this gemma2 model has a soft cap on its logits"):
        distill(tiny.settings(model, tmp_path / "no such text", tmp_path / "run", steps=1))
    assert not (tmp_path / "run" / "curves.jsonl").exists()
