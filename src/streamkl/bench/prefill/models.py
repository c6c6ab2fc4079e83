"""The models whose prefill is timed: a checkpoint, or the shape of a published one with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SHAPES: dict[str, dict[str, Any]] = {
    # Qwen/Qwen3-0.6B's config.json
    "Qwen3-0.6B": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    # Qwen/Qwen3-8B's config.json
    "Qwen3-8B": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}  # fmt: skip
"""Published shapes, by the name of their model; their weights are random."""


def make(name: str, layers: int | None, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a shape or of a checkpoint's folder, for inference.

    Args:
        name: One of `SHAPES`, or the folder of a checkpoint.
        layers: How many of its layers; all if ``None``.
        dtype: Of weights and activations.
    """
    kept = {} if layers is None else {"num_hidden_layers": layers}
    if name not in SHAPES:
        if not Path(name).is_dir():
            raise ValueError(f"a model is one of {', '.join(SHAPES)}, or the folder of a checkpoint: got {name!r}")
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **kept).eval()
    shape = SHAPES[name] | kept
    config = AutoConfig.for_model(str(shape.pop("model_type")), **shape)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def layers_of(name: str) -> int:
    """How many layers a shape or checkpoint has in all."""
    if name in SHAPES:
        return SHAPES[name]["num_hidden_layers"]
    return AutoConfig.from_pretrained(name).get_text_config().num_hidden_layers
