"""Tiny random models with a tokenizer of bytes, as folders that ``from_pretrained`` loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from streamkl.distillation import Settings
from streamkl.distillation.teacher import auto_class

VOCABULARY = 257


def llama(folder: Path, **options: Any) -> Path:
    """Two layers unless options say otherwise, four query and two key heads of 16."""
    small: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3,
    }  # fmt: skip
    return save(folder, LlamaConfig(**{**small, **options}))


def save(folder: Path, config: Any, change: Callable[[Any], None] = lambda model: None) -> Path:
    """A model of random weights, changed if that is asked for, and a tokenizer."""
    torch.manual_seed(0)
    model = auto_class(config).from_config(config)
    change(model)
    model.save_pretrained(folder)
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


def gemma3(folder: Path) -> Path:
    """Three layers, the second of which attends in a window."""
    from transformers import Gemma3TextConfig

    return save(folder, Gemma3TextConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, initializer_range=0.3, query_pre_attn_scalar=16, sliding_window=20,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ))  # fmt: skip


def qwen2(folder: Path) -> Path:
    """Two layers, of a model without a family file."""
    from transformers import Qwen2Config

    return save(folder, Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3,
    ))  # fmt: skip


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


def sharp(folder: Path, family: str) -> Path:
    """A model with indexers of its own whose attention has an entropy below half of that of uniform attention."""
    from streamkl.testing.tiny_models import tiny_config

    names = {"minimax_m3_vl": None, "qwen4_exp": "indexer_budget"}
    name = names.get(family, "index_topk")
    topk = {} if name is None else {name: 12}
    return save(folder, tiny_config(family, vocab_size=VOCABULARY, **topk), sharpen)


@torch.no_grad()
def sharpen(model: Any, tokens: int = 96) -> None:
    """Scales the queries of each layer until the entropy of its attention, the mean of its heads, is low."""
    from streamkl.distillation import attention
    from streamkl.integrations.transformers import capture_attention
    from streamkl.integrations.transformers.families import family_of

    before = model.config.get_text_config()._attn_implementation
    attention.register()
    model.eval().set_attn_implementation(attention.NAME)
    ids = torch.randint(VOCABULARY - 1, (2, tokens), generator=torch.Generator().manual_seed(0))
    family = family_of(model.config)
    modules = {n: module for n, module in family.attentions(model).items() if family.is_global(module)}
    if family.windowed:
        modules = {number: module for number, module in modules.items() if family.own(module) is not None}
    own = {number: family.own(module) for number, module in modules.items() if family.own(module) is not None}
    for module in modules.values():
        family.prepare(module, attention.Causal())
    for indexer in own.values():
        indexer.forward = lambda *args, **kwargs: ids.new_empty((*ids.shape, 0))  # attention is dense
    sharpened = set()
    for _ in range(40):
        with capture_attention(model, layers=list(modules)) as captured:
            model.base_model(input_ids=ids, use_cache=False)
        for number, module in modules.items():
            if entropy(captured[number].call) < 0.5 * torch.tensor(tokens / captured[number].call.key_span).log():
                sharpened.add(number)
            elif hasattr(module, "compressor"):  # its queries are normed
                module.compressor.kv_norm.weight *= 1.25
            elif (queries := getattr(module, "q_b_proj", getattr(module, "q_gate_proj", None))) is not None:
                queries.weight *= 1.25
            elif hasattr(module, "q_norm"):  # its weight is 1 more
                module.q_norm.weight.mul_(1.25).add_(0.25)
            else:
                module.q_proj.weight *= 1.25
    assert sharpened == modules.keys()
    for indexer in own.values():
        del indexer.forward
    for module in modules.values():
        vars(module).pop("build_attention_mask_from_topk", None)
    model.set_attn_implementation(before)


def entropy(call: Any) -> torch.Tensor:
    """Of the mean of the heads' attention, the mean over queries."""
    k = call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1)
    q = call.q[:, :, call.key_span - 1 :: call.key_span]  # as many queries as keys
    logits = (q @ k.mT * call.scale).masked_fill(torch.ones(k.shape[2], k.shape[2]).triu(1) > 0, -torch.inf)
    mean = logits.softmax(-1).mean(1)
    return -torch.where(mean > 0, mean * mean.clamp(min=1e-30).log(), 0).sum(-1).mean()
