"""vLLM's CPU backend with prompts that attend to selected keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import (  # pyright: ignore[reportMissingImports]  # an extra
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from streamkl.integrations.vllm import pages
from streamkl.integrations.vllm.backends import BACKENDS, sparse


@dataclass
class SparseMetadata(sparse.SparseStep, CPUAttentionMetadata):
    """A step."""


class SparseMetadataBuilder(sparse.SparseMetadataBuilder, CPUAttentionMetadataBuilder):
    """Splits each step into sparse and dense requests.

    Raises:
        ValueError: The layout of the pages is not known.
    """

    step = SparseMetadata

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        pages.check_layout(self.isa)


class SparseImpl(sparse.SparseImpl, CPUAttentionBackendImpl):
    """Attends to selected keys where a step's metadata says so, and else as vLLM does."""

    layout = pages.TransposedPages


class SparseBackend(sparse.SparseBackend, CPUAttentionBackend):  # pyright: ignore[reportIncompatibleMethodOverride]  # static in vLLM
    """The backend of layers whose keys are selected."""

    name, impl, builder = BACKENDS["CPU_ATTN"][0], SparseImpl, SparseMetadataBuilder
