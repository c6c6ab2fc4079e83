"""The architectures that are served sparse, by their names in a model's config."""

from __future__ import annotations

SPARSE = "StreamKL"
"""What the name of a sparse model's class starts with."""
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Grouped-query models whose attention modules have ``rotary_emb`` and ``attn``. SmolLM2 is a Llama."""
