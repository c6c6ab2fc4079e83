"""Index keys in vLLM's paged cache: a layer of their own in the page table of the KV cache.

A page that prefix caching shares or that a request frees holds the index keys of its tokens, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config  # pyright: ignore[reportMissingImports]  # an extra
from vllm.model_executor.layers.attention_layer_base import (  # pyright: ignore[reportMissingImports]
    AttentionLayerBase,
)
from vllm.v1.attention.backend import (  # pyright: ignore[reportMissingImports]
    AttentionBackend,
    AttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SparseCacheRole  # pyright: ignore[reportMissingImports]


class IndexCache(nn.Module, AttentionLayerBase):
    """The index keys of one layer.

    Args:
        dim: Width of an index key.
        dtype: Of the index keys.
        name: A name that no other layer has.

    Attributes:
        kv_cache: ``[pages, tokens, dim]``.
    """

    def __init__(self, dim: int, dtype: torch.dtype, name: str) -> None:
        super().__init__()
        self.dim, self.dtype = dim, dtype
        self.kv_cache = torch.tensor([])
        layers = get_current_vllm_config().compilation_config.static_forward_context
        if name in layers:
            raise ValueError(f"there are two layers of the name {name}")
        layers[name] = self

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Takes the pages that vLLM allocated, ``[pages, 1, tokens, dim]``."""
        self.kv_cache = kv_cache.squeeze(1)

    def get_kv_cache_spec(self, vllm_config: Any) -> MLAAttentionSpec:
        """One vector per token, the same on every rank of tensor parallelism."""
        return MLAAttentionSpec(
            block_size=vllm_config.cache_config.block_size, num_kv_heads=1, head_size=self.dim, dtype=self.dtype,
            max_tp_shards=1, cache_role=SparseCacheRole.INDEXER,
        )  # fmt: skip

    def get_attn_backend(self) -> type[AttentionBackend]:
        """One without kernels: the attention layer beside it reads and writes the pages."""
        return IndexKeyBackend


class IndexKeyBackend(AttentionBackend):
    """What vLLM asks of a layer with pages."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012  # as vLLM declares it

    @staticmethod
    def get_name() -> str:
        """Of the backend."""
        return "STREAMKL_INDEX_KEYS"

    @staticmethod
    def get_impl_cls() -> Any:
        """Nothing attends to index keys."""
        raise NotImplementedError("index keys are read by the attention layer beside them")

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """One that makes no metadata."""
        return NoMetadataBuilder


class NoMetadataBuilder(AttentionMetadataBuilder):
    """The attention layer's own metadata is that of its index keys."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> None:
        """None."""
