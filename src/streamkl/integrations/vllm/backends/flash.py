"""vLLM's FlashAttention backend with prompts that attend to selected keys. It has not been run on a GPU yet."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.attention.backends.flash_attn import (  # pyright: ignore[reportMissingImports]  # an extra
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from streamkl.integrations.vllm import pages
from streamkl.integrations.vllm.backends import BACKENDS, gpu, sparse


@dataclass
class SparseMetadata(sparse.SparseStep, FlashAttentionMetadata):
    """A step."""


class SparseMetadataBuilder(gpu.SingleTokenGraphs, sparse.SparseMetadataBuilder, FlashAttentionMetadataBuilder):
    """Splits each step into sparse and dense requests."""

    step = SparseMetadata


class SparseImpl(sparse.SparseImpl, FlashAttentionImpl):
    """Attends to selected keys where a step's metadata says so, and else as vLLM does."""

    layout = pages.HalvedPages


class SparseBackend(sparse.SparseBackend, FlashAttentionBackend):  # pyright: ignore[reportIncompatibleMethodOverride]  # static in vLLM
    """The backend of layers whose keys are selected."""

    name, impl, builder = BACKENDS["FLASH_ATTN"][0], SparseImpl, SparseMetadataBuilder
