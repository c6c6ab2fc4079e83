"""Qwen4 (``qwen4_exp``), and its text model: indexers score blocks of keys, and the newest keys are always seen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from streamkl.indexer import Indexer, apply_rope
from streamkl.integrations.transformers.families.base import Attention, Inputs, OwnIndexers, few
from streamkl.integrations.transformers.families.compressed import SelectsBlocks
from streamkl.sparse import IndexTensors


class BlockIndexer(Indexer):
    """Relu heads without weights over blocks of ``key_span`` tokens; a block's key is the mean of its tokens', normed.

    RoPE rotates the first dims of a head; that of a block is its first token's.

    Args:
        own: The indexer of transformers, whose map and norms it has, by their names.
        rope_dim: How many dims of a head are rotated.
    """

    kind = "block"

    def __init__(self, own: Any, rope_dim: int) -> None:
        super().__init__(own.index_head_dim, rope_dim, "half", 10000.0, "relu")
        self.heads: int = own.index_n_heads
        self.key_span = own.compress_ratio
        self.index_qk_proj: nn.Module = own.index_qk_proj
        self.q_layernorm: nn.Module = own.q_layernorm
        self.k_layernorm: nn.Module = own.k_layernorm

    def forward(
        self,
        hidden: Tensor,
        query: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> IndexTensors:
        """Projects the hidden states of whole sequences: ``index_k`` is ``[B, N // key_span, D]``.

        Args:
            hidden: ``[B, N, hidden_dim]``.
            query: Not supported.
            positions: Not read.
            position_embeddings: ``(cos, sin)``, each ``[B or 1, N, rope_dim]``.
            cu_seqlens: Not supported.
        """
        if cu_seqlens is not None or query is not None or position_embeddings is None:
            raise ValueError("a BlockIndexer takes whole sequences, with position_embeddings")
        q, k = self.index_qk_proj(hidden).split((self.heads * self.head_dim, self.head_dim), -1)
        q = self.q_layernorm(q.unflatten(-1, (self.heads, self.head_dim)))  # [B, N, J, D]
        q = apply_rope(q, *(table.unsqueeze(-2) for table in position_embeddings), layout=self.rope_layout)
        last = k.shape[1] // self.key_span * self.key_span  # tokens at the end that make no block are left
        wide = torch.promote_types(k.dtype, torch.float32)
        means = k[:, :last].unflatten(1, (-1, self.key_span)).to(wide).mean(2).to(k.dtype)
        k = self.k_layernorm(means)
        k = apply_rope(k, *(table[:, : last : self.key_span] for table in position_embeddings), layout=self.rope_layout)
        return IndexTensors(q.transpose(1, 2), k, None)


class Qwen4Exp(SelectsBlocks, OwnIndexers):
    """Grouped-query attention in some layers, linear attention in others. A query sees the keys of its own block, too.

    A block learns the largest mean attention to one of its keys (Megatron-LM, pull request 7234). The keys of the
    incomplete block are in the denominator.
    """

    name = "qwen4_exp"
    model_types = ("qwen4_exp", "qwen4_exp_text")
    attention = "Qwen4ExpTextAttention"
    target = "block_max"
    not_sparse = "it builds the mask of its attention from the selected keys, and none can be gathered in its place"

    def own_topk(self, config: Any) -> int:
        """That of the config, in keys."""
        return config.get_text_config().indexer_budget

    def key_span(self, attention: Attention) -> int:
        """Of a block."""
        return attention.indexer.compress_ratio

    def indexer(self, attention: Attention) -> BlockIndexer:
        """A `BlockIndexer` over the module's own map and norms, so that training it trains the model's indexer."""
        factor = attention.config.rope_parameters.get("partial_rotary_factor", 1.0)
        return BlockIndexer(attention.indexer, int(attention.head_dim * factor))

    def project(self, indexer: Indexer, inputs: Inputs) -> IndexTensors:
        """From hidden states."""
        return indexer(inputs.hidden.detach(), position_embeddings=inputs.position_embeddings)

    def fingerprint(self, attention: Attention) -> Tensor:
        """Of the query projection."""
        return few(attention.q_proj)
