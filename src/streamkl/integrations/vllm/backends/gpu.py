"""Which CUDA graphs the sparse backends of GPUs may be part of."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import AttentionCGSupport  # pyright: ignore[reportMissingImports]  # an extra

from streamkl.integrations.vllm.backends.sparse import selects_for_decodes


class SingleTokenGraphs:
    """Before a metadata builder: steps of decoded tokens are graphs, unless they select keys; prompts never are."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """What vLLM may capture."""
        if selects_for_decodes(vllm_config):
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
