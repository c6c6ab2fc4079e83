"""A tiny random model of every causal language model that the installed transformers has, by its model type."""

from __future__ import annotations

import warnings
from typing import Any

import torch

VOCAB = 96
SIZES = {
    "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "max_position_embeddings": 256, "n_positions": 256,
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "hidden_size_per_layer_input": 8, "embedding_dim": 32,
    "attention_hidden_size": 32, "ple_embed_dim": 32, "encoder_hidden_size": 32,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "num_key_value_heads": 2, "kv_n_heads": 2, "num_query_groups": 2,
    "num_global_key_value_heads": 2, "head_dim": 8, "d_head": 8, "d_kv": 8, "kv_channels": 8, "attention_head_dim": 8,
    "rotary_dim": 4, "num_layers_per_stack": 1, "laurel_rank": 8,
    "intermediate_size": 48, "intermediate_size_mlp": 48, "ffn_hidden_size": 48, "shared_intermediate_size": 16,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "expert_ffn_hidden_size": 16, "n_inner": 48,
    "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "d_inner": 48, "dff": 48, "dim_ff": 48, "d_ff": 48, "dim_head": 8,
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "zero_expert_num": 2,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1,
    "num_expert_group": 1, "num_dense_layers": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "qk_head_dim": 16, "index_topk": 64, "index_n_heads": 4, "index_head_dim": 16, "sliding_window": 8,
    "attention_chunk_size": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_head_dim": 8, "linear_num_heads": 2, "mamba_n_heads": 8, "mamba_d_head": 8,
    "mamba_d_state": 8, "mamba_d_ssm": 64, "mamba_chunk_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 8,
    "mamba_headdim": 8, "mamba_dt_rank": 4, "n_mamba_heads": 2, "ssm_state_size": 8, "state_size": 8, "chunk_size": 16,
    "adapter_rank": 4, "ngram_vocab_size_base": 64, "make_ngram_vocab_size_divisible_by": 1, "split_ngram_parts": 2,
    "hc_lowrank": 4, "num_hash_layers": 1, "encoder_hash_byte_group_vocab": 64, "hidden_size_global": 32,
}  # fmt: skip
"""What the options of any config are made, if they are larger."""
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
NEVER = ("id2label", "label2id", "transformers_version", "model_type", "dtype", "architectures", "per_layer_config")
"""Entries of a config that are left to its class."""
HYBRID = {"num_hidden_layers": 3}
QWEN4: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 64,
    "indexer_compress_ratio": 4, "layer_types": ["linear_attention", "full_attention"], "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "hc_lowrank": 4, "ngram_vocab_size_base": 64, "split_ngram_parts": 2,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "bamba": {**HYBRID, "attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_theta": 10000.0, "rope_type": "default"}}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.0] * 4,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "position_embedding_type": "rope"},
    "jamba": {**HYBRID, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "ministral": {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2, "index_head_dim": 8,
        "index_block_size": 4, "index_topk_blocks": 16,
    },
    "mamba2": {"num_heads": 8, "n_groups": 1},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": QWEN4,
    "qwen4_exp": {"text_config": QWEN4},
    "recurrent_gemma": HYBRID,
    "reformer": {"axial_pos_embds": False},
    "zamba": {
        "attention_hidden_size": 64, "attention_head_dim": 16, "layers_block_type": ["mamba", "hybrid", "hybrid"],
    },
    "zamba2": {
        "attention_hidden_size": 64, "attention_head_dim": 16, "num_key_value_heads": 4, "mamba_headdim": 32,
        "hybrid_layer_ids": [2],
    },
}  # fmt: skip
"""Options of single types whose defaults make no whole model, or none that attends in its first layers."""


def model_types() -> list[str]:
    """The model types of ``AutoModelForCausalLM``."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_causal_model(model_type: str, seed: int = 0, **options: Any) -> Any:
    """A model of a type, in evaluation mode: one layer of each kind that its config has, two at least.

    Args:
        model_type: One of `model_types`.
        seed: Of its weights.
        options: Of its config, in place of those here.

    Examples:
        >>> from streamkl.testing.causal_models import tiny_causal_model
        >>> model = tiny_causal_model("mistral", sliding_window=None)
        >>> type(model).__name__, model.config.num_hidden_layers
        ('MistralForCausalLM', 2)
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        config_class: Any = CONFIG_MAPPING[model_type]
        config = config_class(**{**_small(config_class().to_dict()), **OWN.get(model_type, {}), **options})
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # attention is far from uniform, and biases and norms from 0 and 1
        parameter.data += (0.3 if parameter.dim() == 2 else 0.05) * torch.randn_like(parameter)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None  # it writes as many tokens as it is asked for
    return model.eval()


def _small(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a config, with small sizes and few layers, those of configs in it included."""
    depth = next((options[name] for name in DEPTHS if isinstance(options.get(name), int)), 0)
    kept = _kinds(options, depth)
    small: dict[str, Any] = {}
    for name, value in options.items():
        if name in NEVER:
            continue
        if isinstance(value, dict) and ("config" in name or "model_type" in value):
            small[name] = {**_small(value), **({"model_type": value["model_type"]} if "model_type" in value else {})}
        elif isinstance(value, list) and depth > 2 and len(value) == depth:
            small[name] = [_size(name, value[layer]) for layer in kept]
        elif name in DEPTHS and isinstance(value, int):
            small[name] = min(value, len(kept))
        else:
            small[name] = _size(name, value)
    if "is_decoder" in small:
        small["is_decoder"] = True
    if "kv_lora_rank" in small:  # latent attention has as many key heads as query heads
        small["num_key_value_heads"] = small["num_attention_heads"]
    for number, name in enumerate(sorted(name for name in small if name.endswith("token_id"))):
        if isinstance(small[name], (int, list)):
            small[name] = 0 if name == "pad_token_id" else VOCAB - 1 - number
    return small


def _size(name: str, value: Any) -> Any:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return min(value, SIZES[name]) if whole and name in SIZES else value


def _kinds(options: dict[str, Any], depth: int) -> list[int]:
    """The first layer of each kind, by the lists that name the kinds of layers; two layers at least."""
    lists = [value for name, value in options.items() if isinstance(value, list) and len(value) == depth]
    named = [each for each in lists if all(isinstance(kind, str) for kind in each)]
    first: dict[tuple, int] = {}
    for layer in range(depth):
        first.setdefault(tuple(each[layer] for each in named), layer)
    return sorted({*first.values(), min(1, max(depth - 1, 0))})
