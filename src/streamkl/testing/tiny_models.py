"""Tiny random models of each family of transformers, with what makes it special: windows, linear layers and so on."""

from __future__ import annotations

import warnings
from typing import Any

import torch

VOCAB = 61
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
    "initializer_range": 0.3, "tie_word_embeddings": False,
}  # fmt: skip
LINEAR = {
    "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3, "head_dim": 16,
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 16, "num_experts_per_tok": 2, "norm_topk_prob": True, "experts_implementation": "eager",
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "index_topk": 6, "index_n_heads": 16, "index_head_dim": 16, **EXPERTS,
}  # fmt: skip
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_next": (
        "Qwen3Next", {**LINEAR, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    "qwen3_5": ("Qwen3_5", LINEAR),
    "gemma3": ("Gemma3", {
        "num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "sliding_window": 7, "query_pre_attn_scalar": 8,
    }),
    "deepseek_v32": ("DeepseekV32", LATENT),
    "glm_moe_dsa": ("GlmMoeDsa", {**LATENT, "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}),
}  # fmt: skip
FAMILIES = tuple(OPTIONS)
GROUPED_QUERY = FAMILIES[:5]
SPARSE_LATENT = FAMILIES[5:]


def tiny_model(family: str, seed: int = 0, **options: Any) -> Any:
    """A model of a family, in evaluation mode.

    Args:
        family: One of `FAMILIES`.
        seed: Of its weights.
        options: Of its config, in place of those here.
    """
    import transformers

    name, own = OPTIONS[family]
    config_name = {"Qwen3_5": "Qwen3_5TextConfig", "Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config")
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        config = getattr(transformers, config_name)(**{**COMMON, **own, **options})
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():  # biases and norms are not at 0 and 1
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.eval()


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    """Random tokens, none of them the padding's."""
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))
