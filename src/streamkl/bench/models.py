"""Attention layouts of real models, from their published ``config.json``.

The head dim of Qwen3 is given as ``head_dim``, elsewhere it is ``hidden_size / num_attention_heads``.
"""

from __future__ import annotations

from typing import NamedTuple


class Layout(NamedTuple):
    """Query heads, key heads and head dim of one attention layer."""

    heads: int
    kv_heads: int
    dim: int


MODELS = {
    # HuggingFaceTB/SmolLM2-135M: num_attention_heads 9, num_key_value_heads 3, hidden_size 576
    "SmolLM2-135M": Layout(9, 3, 64),
    # Qwen/Qwen3-0.6B: num_attention_heads 16, num_key_value_heads 8, head_dim 128
    "Qwen3-0.6B": Layout(16, 8, 128),
    # Qwen/Qwen3-8B: num_attention_heads 32, num_key_value_heads 8, head_dim 128
    "Qwen3-8B": Layout(32, 8, 128),
    # meta-llama/Meta-Llama-3-8B: num_attention_heads 32, num_key_value_heads 8, hidden_size 4096
    "Llama-3-8B": Layout(32, 8, 128),
    # deepseek-ai/DeepSeek-V3.2: num_attention_heads 128, qk_nope_head_dim 128 + qk_rope_head_dim 64
    "DeepSeek-V3.2": Layout(128, 128, 192),
    # The same with the key projection absorbed into the query: kv_lora_rank 512 + qk_rope_head_dim 64, one key head
    "DeepSeek-V3.2 absorbed": Layout(128, 1, 576),
}
