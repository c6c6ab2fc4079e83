"""vLLM's Triton backend with prompts that attend to selected keys. It has not been run on a GPU yet."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.attention.backends.triton_attn import (  # pyright: ignore[reportMissingImports]  # an extra
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)

from streamkl.integrations.vllm import pages
from streamkl.integrations.vllm.backends import BACKENDS, gpu, sparse


@dataclass
class SparseMetadata(sparse.SparseStep, TritonAttentionMetadata):
    """A step."""


class SparseMetadataBuilder(gpu.SingleTokenGraphs, sparse.SparseMetadataBuilder, TritonAttentionMetadataBuilder):
    """Splits each step into sparse and dense requests."""

    step = SparseMetadata


class SparseImpl(sparse.SparseImpl, TritonAttentionImpl):
    """Attends to selected keys where a step's metadata says so, and else as vLLM does."""

    layout = pages.HalvedPages


class SparseBackend(sparse.SparseBackend, TritonAttentionBackend):  # pyright: ignore[reportIncompatibleMethodOverride]  # static in vLLM
    """The backend of layers whose keys are selected."""

    name, impl, builder = BACKENDS["TRITON_ATTN"][0], SparseImpl, SparseMetadataBuilder
