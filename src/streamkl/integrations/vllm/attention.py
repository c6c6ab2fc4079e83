"""The attention layer and the attention module of a sparse model, in place of vLLM's."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config  # pyright: ignore[reportMissingImports]  # an extra
from vllm.model_executor.layers.attention import Attention  # pyright: ignore[reportMissingImports]

from streamkl.indexer import Indexer
from streamkl.indexer.rope import fewer_frequencies
from streamkl.integrations.vllm import ops as _ops  # noqa: F401  # registers the operator
from streamkl.integrations.vllm.backends import backend_for
from streamkl.integrations.vllm.index_cache import IndexCache
from streamkl.sparse import IndexTensors, Selector


class SparseAttention(Attention):
    """An attention layer whose prompts attend to selected keys.

    Args:
        dense: vLLM's layer, whose place it takes.
        selector: Selects the keys.
        indexer: What the selector ranks keys by, if it is an indexer's.
    """

    def __init__(self, dense: Attention, selector: Selector, indexer: Indexer | None) -> None:
        config = get_current_vllm_config()
        del config.compilation_config.static_forward_context[dense.layer_name]
        super().__init__(
            dense.num_heads, dense.head_size, dense.impl.scale, num_kv_heads=dense.num_kv_heads,
            cache_config=config.cache_config, quant_config=dense.quant_config, prefix=dense.layer_name,
            attn_backend=backend_for(dense.attn_backend.get_name()),
        )  # fmt: skip
        self.selector = selector
        self.index: IndexTensors | None = None
        self.index_cache = None
        if indexer is not None:
            dtype = next(indexer.parameters()).dtype
            self.index_cache = IndexCache(indexer.head_dim, dtype, f"{dense.layer_name}.index_cache")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output_shape: torch.Size | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Attends with the index tensors that the module left in ``index``.

        Args:
            query: ``[T, H * D]``, after RoPE.
            key: ``[T, Hkv * D]``.
            value: ``[T, Hkv * D]``.
            output_shape: Of backends whose output is not shaped like the queries: not of these.
            output_dtype: Of backends that quantise their output: not of these.

        Returns:
            ``[T, H * D]``.
        """
        q = query.view(-1, self.num_heads, self.head_size)
        k, v = (x.view(-1, self.num_kv_heads, self.head_size) for x in (key, value))
        output = torch.empty_like(q)
        index_q, index_k, index_w = self.index or (None, None, None)
        torch.ops.streamkl.vllm_attention(q, k, v, output, index_q, index_k, index_w, self.layer_name)
        return output.view(-1, self.num_heads * self.head_size)


class Indexed:
    """What an attention module of vLLM does besides, if its layer selects keys by an indexer.

    Attributes:
        indexer: The indexer.
    """

    attn: SparseAttention
    indexer: Indexer
    rotary_emb: Any

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """The module's own forward, with the tensors of the indexer for its attention layer."""
        self.attn.index = self.index_tensors(positions, hidden_states)
        out = super().forward(positions, hidden_states)  # pyright: ignore[reportAttributeAccessIssue]  # vLLM's module
        self.attn.index = None
        return out

    def index_tensors(self, positions: Tensor, hidden: Tensor) -> IndexTensors:
        """The tensors of the indexer: ``[J, T, Di]``, ``[T, Di]``, ``[T, J]`` or ``None``.

        Args:
            positions: ``[T]``.
            hidden: ``[T, hidden_dim]``: the input of the attention module.
        """
        halves = self.rotary_emb.cos_sin_cache[positions].chunk(2, -1)
        cos, sin = (fewer_frequencies(torch.cat((x, x), -1), self.indexer.rope_dim) for x in halves)
        index_q, index_k, index_w = self.indexer(hidden[None], position_embeddings=(cos, sin))
        return IndexTensors(index_q[0], index_k[0], None if index_w is None else index_w[0])


@functools.cache
def indexed(module: type[nn.Module]) -> type[nn.Module]:
    """The class of attention modules of a class of vLLM's that have an indexer."""
    return type(f"Indexed{module.__name__}", (Indexed, module), {})
