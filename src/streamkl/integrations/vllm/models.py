"""The sparse models: vLLM's own, with other attention layers and the weights of a folder of indexers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention  # pyright: ignore[reportMissingImports]  # an extra
from vllm.model_executor.models.llama import LlamaForCausalLM  # pyright: ignore[reportMissingImports]
from vllm.model_executor.models.mistral import MistralForCausalLM  # pyright: ignore[reportMissingImports]
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM  # pyright: ignore[reportMissingImports]
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM  # pyright: ignore[reportMissingImports]
from vllm.model_executor.models.utils import extract_layer_index  # pyright: ignore[reportMissingImports]

from streamkl.indexer import Indexer
from streamkl.integrations.saved import folder
from streamkl.integrations.saved.description import check_model, describe_model, indexer_of
from streamkl.integrations.vllm.attention import SparseAttention, indexed
from streamkl.integrations.vllm.settings import Settings, settings_of


class Sparse:
    """What a sparse model does besides its base class of vLLM's."""

    config: Any
    named_parameters: Any

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # pyright: ignore[reportCallIssue]  # vLLM's model
        settings = settings_of(vllm_config.model_config)
        assert settings is not None, "the config hook chooses this class for sparse models only"
        check_pages(vllm_config, settings)
        self.streamkl, self._modules_of = settings, attention_modules(self)
        make_sparse(self._modules_of, settings, self.config.hidden_size)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Those of the checkpoint, and those of the folder of indexers.

        Raises:
            ValueError: The indexers belong to another model.
        """
        loaded = super().load_weights(weights)  # pyright: ignore[reportAttributeAccessIssue]  # vLLM's model
        settings: Settings = self.streamkl
        if settings.indexers is not None:
            fill(self._modules_of, settings.indexers, describe_model(self.config, fingerprint(self._modules_of)))
        return {*loaded, *(name for name, _ in self.named_parameters() if ".indexer." in name)}


class StreamKLLlamaForCausalLM(Sparse, LlamaForCausalLM):
    """Llama, SmolLM2 among others."""


class StreamKLMistralForCausalLM(Sparse, MistralForCausalLM):
    """Mistral without a window."""


class StreamKLQwen2ForCausalLM(Sparse, Qwen2ForCausalLM):
    """Qwen2 and Qwen2.5."""


class StreamKLQwen3ForCausalLM(Sparse, Qwen3ForCausalLM):
    """Qwen3."""


def attention_modules(model: Any) -> dict[int, Any]:
    """The attention modules of a model that see all keys, by the number of their layer."""
    found = [module for module in model.modules() if isinstance(getattr(module, "attn", None), Attention)]
    return {extract_layer_index(m.attn.layer_name): m for m in found if m.attn.sliding_window is None}


def check_pages(vllm_config: Any, settings: Settings) -> None:
    """Refuses pages that query blocks do not fill, where prompts share them.

    A key's value depends on the later tokens of its query block, which must lie in the page that is shared with it.
    """
    size, block = vllm_config.cache_config.block_size, settings.selector.query_block
    if vllm_config.cache_config.enable_prefix_caching and size % block:
        raise ValueError(
            f"prefix caching shares pages of whole query blocks: got pages of {size} tokens and query blocks of "
            f"{block}; choose --block-size, or --no-enable-prefix-caching"
        )


def make_sparse(modules: dict[int, Any], settings: Settings, hidden_dim: int) -> None:
    """Gives attention modules layers that select keys, and indexers without weights.

    Args:
        modules: The attention modules that see all keys, by the number of their layer.
        settings: Of the model.
        hidden_dim: Width of the hidden states.

    Raises:
        ValueError: The indexers are for other layers.
    """
    if not modules:
        raise ValueError("none of the model's layers attends to all keys: there is nothing to select")
    described = settings.description
    if described is not None and sorted(described["layers"]) != sorted(modules):  # one rank has all layers
        raise ValueError(f"{settings.indexers} is for layers {sorted(described['layers'])}, not {sorted(modules)}")
    for module in modules.values():
        indexer: Indexer | None = None
        if described is not None:
            indexer = indexer_of(described["indexer"], hidden_dim).requires_grad_(False)
            module.__class__, module.indexer = indexed(type(module)), indexer
        module.attn = SparseAttention(module.attn, settings.selector, indexer)


def fingerprint(modules: dict[int, Any]) -> Tensor:
    """The first weights of the first query projection; empty if they are quantised, or of another rank."""
    weight = getattr(modules[min(modules)].qkv_proj, "weight", None)
    rank = getattr(modules[min(modules)].qkv_proj, "tp_rank", 0)
    if rank or weight is None or not weight.is_floating_point() or weight.is_meta:
        return torch.empty(0)
    return weight.detach().flatten()[:64].float().cpu()


@torch.no_grad()
def fill(modules: dict[int, nn.Module], place: Path, ours: dict[str, Any]) -> None:
    """Gives the indexers of attention modules their weights.

    Args:
        modules: The attention modules, by the number of their layer.
        place: The folder of indexers.
        ours: The model by `describe_model`, with its weights.

    Raises:
        ValueError: They belong to another model, or have other shapes.
    """
    shapes, description = folder.read(place)
    check_model(place, description, ours)
    wanted = {
        f"layers.{layer}.{name}": weight
        for layer, module in modules.items()
        for name, weight in module.indexer.state_dict(keep_vars=True).items()  # pyright: ignore
    }
    folder.check_shapes(place, wanted, shapes)
    weights = folder.read_weights(place)
    for name, weight in wanted.items():
        weight.copy_(weights[name])
