"""GLM-5.3 (``glm5_next``), and its text model: indexers score pools of keys, and the newest keys are always seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from streamkl.indexer import LightningIndexer
from streamkl.integrations.transformers.families.base import Attention, Inputs
from streamkl.integrations.transformers.families.compressed import SelectsBlocks
from streamkl.integrations.transformers.families.dsa import SparseLatent
from streamkl.sparse import IndexTensors


class PooledIndexer(LightningIndexer):
    """A `LightningIndexer` over pools of ``key_span`` keys, each a gated mean of its keys."""

    index_kpool_compress_ape: nn.Parameter
    """``[key_span, D]``: added to the gates of a pool's keys."""
    index_kpool_compress_gate: nn.Parameter
    """``[D, hidden_dim]``: the map of the gates."""

    def forward(
        self,
        hidden: Tensor,
        query: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> IndexTensors:
        """Projects whole sequences: ``index_k`` is ``[B, N // key_span, D]``; see `Indexer.forward`."""
        index = super().forward(hidden, query, position_embeddings=position_embeddings, cu_seqlens=cu_seqlens)
        count, span = hidden.shape[1] // self.key_span, self.key_span
        gates = functional.linear(hidden, self.index_kpool_compress_gate)
        gates, keys = (x[:, : count * span].unflatten(1, (count, span)) for x in (gates, index.index_k))
        wide = torch.promote_types(gates.dtype, torch.float32)
        share = (gates.to(wide) + self.index_kpool_compress_ape.to(wide)).softmax(2).to(keys.dtype)
        return index._replace(index_k=(share * keys).sum(2))


class Glm5Next(SelectsBlocks, SparseLatent):
    """No RoPE; some layers share the pools of the one before. A query sees the keys of its own, incomplete pool.

    No loss of these models is published. The indexer learns the attention to a pool's keys, summed; those of the
    incomplete pool are in the denominator.
    """

    name = "glm5_next"
    model_types = ("glm5_next", "glm5_next_text")
    attention = "Glm5NextTextAttention"
    rope_layout = "half"
    target = "block_sum"
    kind = PooledIndexer
    maps = (*SparseLatent.maps, "index_kpool_compress_ape", "index_kpool_compress_gate")
    not_sparse = "it builds the mask of its attention from the selected keys, and none can be gathered in its place"

    def key_span(self, attention: Attention) -> int:
        """Of a pool."""
        return attention.config.index_kpool

    def indexer(self, attention: Attention) -> LightningIndexer | None:
        """A `PooledIndexer` over the module's own maps.

        Raises:
            ValueError: Queries do not always see the keys of an incomplete pool.
        """
        made = super().indexer(attention)
        if made is None:
            return None
        if not attention.config.index_kpool_always_select_tail:
            raise ValueError(
                "glm5_next is distilled with index_kpool_always_select_tail: without it the first queries see no key"
            )
        made.key_span = self.key_span(attention)
        return made

    def prepare(self, attention: Attention, mask: Any) -> None:
        """The module builds a mask of queries and keys from what its indexer returns."""
        attention.build_attention_mask_from_topk = lambda **_: mask

    def own_inputs(self, own: Any, arguments: Mapping[str, Any]) -> Inputs:
        """There is no RoPE."""
        return Inputs(arguments["hidden_states"], None, arguments["q_resid"])
