"""Tiny random models of each family of transformers, with what makes it special: windows, linear layers and so on."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import torch

VOCAB = 61


def _known(*families: str) -> tuple[str, ...]:
    """Those that this version of transformers has; none without it."""
    if importlib.util.find_spec("transformers") is None:
        return ()
    return tuple(name for name in families if importlib.util.find_spec(f"transformers.models.{name}") is not None)


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
SHARED = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}
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
    "glm_moe_dsa": ("GlmMoeDsa", {**LATENT, **SHARED}),
    "axk2": ("AXK2", LATENT),
    "dots3_note": ("Dots3Note", {
        **LATENT, "num_hidden_layers": 3, "head_dim": 16,
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        "sliding_window": 5, "num_local_experts": 4, "shared_experts_intermediate_size": 16,
        **{f"swa_{name}": size for name, size in {
            "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "head_dim": 16,
            "qk_nope_head_dim": 8, "v_head_dim": 12,
        }.items()},
    }),
    "mistral_large4": ("MistralLarge4", {
        **LATENT, **SHARED, "num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "full"],
        "no_rope_layers": [1, 1, 0, 1], "kv_source_layers": [0, 0, 2, 3], "final_logit_softcapping": 1000.0,
    }),
    "hy_v4": ("HYV4", {**LATENT, **SHARED, "hc_mult": 2}),
    "minimax_m3_vl": ("MiniMaxM3VL", {
        **EXPERTS, "num_hidden_layers": 3, "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "num_local_experts": 4, "dense_intermediate_size": 48, "shared_intermediate_size": 16,
        "mlp_layer_types": ["dense", "sparse", "sparse"], "index_n_heads": 2, "index_head_dim": 16,
        "index_block_size": 4, "index_topk_blocks": 3, "index_local_blocks": 1, "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
    }),
    "deepseek_v4": ("DeepseekV4", {
        **EXPERTS, "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 12,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                        "compressed_sparse_attention"],
        "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 7}, "sliding_window": 5,
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "n_routed_experts": 4, "n_shared_experts": 1,
        "partial_rotary_factor": 0.5, "o_groups": 2, "o_lora_rank": 8, "hc_mult": 2, "index_topk": 3,
        "index_n_heads": 32, "index_head_dim": 32,
    }),
    "glm5_next": ("Glm5Next", {
        **LATENT, **SHARED, "num_hidden_layers": 4, "indexer_types": ["full", "full", "shared", "full"],
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "indexed_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "qk_rope_head_dim": 0, "qk_nope_head_dim": 16,
        "linear_head_dim": 8, "linear_num_heads": 4, "linear_conv_kernel_dim": 3, "hc_mult": 2, "index_kpool": 3,
        "index_topk": 9, "index_n_heads": 32, "index_head_dim": 32,
    }),
    "qwen4_exp": ("Qwen4Exp", {
        **LINEAR, "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"], "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "hc_count": 2,
        "hc_lowrank": 4, "ngram_vocab_size_base": 64, "split_ngram_parts": 2, "indexer_n_heads": 32,
        "indexer_kv_heads": 1, "indexer_head_dim": 32, "indexer_budget": 9, "indexer_compress_ratio": 3,
        "experts_implementation": "eager",
    }),
}  # fmt: skip
GROUPED_QUERY = ("llama", "qwen3", "qwen3_next", "qwen3_5", "gemma3")
SPARSE_LATENT = _known("deepseek_v32", "glm_moe_dsa", "axk2", "dots3_note", "mistral_large4")
FAMILIES = (*GROUPED_QUERY, *SPARSE_LATENT)
"""Those that ``sparsify`` takes and that run under ``sdpa``."""
OWN_INDEXERS = (*SPARSE_LATENT, *_known("hy_v4", "minimax_m3_vl", "deepseek_v4", "glm5_next", "qwen4_exp"))
"""Those with indexers of their own, of the families that this version of transformers has."""
PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "head_dim": 8, "image_size": 16, "patch_size": 4,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "image_size": 16, "patch_size": 4,
    "out_hidden_size": 32, "projection_intermediate_size": 16,
}  # fmt: skip


def tiny_config(family: str, **options: Any) -> Any:
    """The config of a tiny model of a family.

    Args:
        family: One of `OPTIONS`.
        options: In place of those here.
    """
    import transformers

    name, own = OPTIONS[family]
    text = name in ("Qwen3_5", "Gemma3", "MistralLarge4", "MiniMaxM3VL", "Glm5Next", "Dots3Note", "Qwen4Exp")
    config = getattr(transformers, f"{name}TextConfig" if text else f"{name}Config")(**{**COMMON, **own, **options})
    more: Any = {"text_config": config, "experts_implementation": "eager"}
    if family == "glm5_next":
        return transformers.Glm5NextConfig(vision_config=VISION, **more)
    if family == "mistral_large4":
        return transformers.MistralLarge4Config(vision_config=PIXTRAL, image_token_index=VOCAB - 1, **more)
    return config


def tiny_model(family: str, seed: int = 0, **options: Any) -> Any:
    """A model of a family, in evaluation mode.

    Args:
        family: One of `OPTIONS`.
        seed: Of its weights.
        options: Of its config, in place of those here.
    """
    import transformers

    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        config = tiny_config(family, **options)
        kind = "ForConditionalGeneration" if family in ("mistral_large4", "glm5_next") else "ForCausalLM"
        model = getattr(transformers, f"{OPTIONS[family][0]}{kind}")(config)
    for parameter in model.parameters():  # biases and norms are not at 0 and 1
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.eval()


def tokens(*shape: int, seed: int = 1) -> torch.Tensor:
    """Random tokens, none of them the padding's."""
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))
