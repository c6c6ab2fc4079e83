"""Tiny random models with a tokenizer of bytes, as folders that ``from_pretrained`` loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from streamkl.distillation import Settings

VOCABULARY = 257


def llama(folder: Path, **options: Any) -> Path:
    """Two layers, four query and two key heads of 16."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, initializer_range=0.3, **options,
    )  # fmt: skip
    return save(folder, config)


def save(folder: Path, config: Any) -> Path:
    """A model of random weights, and a tokenizer."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: n for n, character in enumerate(alphabet)} | {"<end>": len(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    return folder


def prose(file: Path, characters: int = 20_000) -> Path:
    """A file of words that come again, in an order that does not."""
    draw = torch.Generator().manual_seed(1)
    words = ["".join(chr(97 + (n * 7 + i * i) % 26) for i in range(2 + n % 7)) for n in range(60)]
    picked = torch.randint(len(words), (characters // 5,), generator=draw)
    file.write_text(" ".join(words[n] for n in picked)[:characters])
    return file


def settings(model: Path, text: Path | list[str], output: Path, **options: Any) -> Settings:
    """A run of a few seconds."""
    named = [str(text)] if isinstance(text, Path) else text
    small: dict[str, Any] = {
        "length": 96, "steps": 12, "batch": 2, "head_dim": 16, "dtype": "float32", "device": "cpu", "log_every": 1,
        "save_every": 3, "warmup": 2, "set": ["disable_tqdm=true"],
    }  # fmt: skip
    return Settings(model=str(model), text=named, output=str(output), **{**small, **options})


LATENT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "index_topk": 12, "index_n_heads": 16, "index_head_dim": 16,
    "moe_intermediate_size": 16, "num_experts_per_tok": 2, "norm_topk_prob": True, "initializer_range": 0.3,
}  # fmt: skip


def deepseek_v32(folder: Path) -> Path:
    """Two layers with indexers of their own."""
    from transformers import DeepseekV32Config

    return save(folder, DeepseekV32Config(num_hidden_layers=2, **LATENT))


def glm_moe_dsa(folder: Path) -> Path:
    """Three layers, the second of which shares the top-k of the first."""
    from transformers import GlmMoeDsaConfig

    return save(folder, GlmMoeDsaConfig(num_hidden_layers=3, indexer_types=["full", "shared", "full"], **LATENT))
