"""The families with an indexer of their own: DeepSeek Sparse Attention over multi-head latent attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamkl.indexer import Indexer, LightningIndexer
from streamkl.indexer.base import Activation
from streamkl.indexer.rope import Layout
from streamkl.integrations.transformers.families.base import Attention, Family, Inputs, few
from streamkl.sparse import IndexerSelector, IndexTensors


class SparseLatent(Family):
    """Models whose attention module calls its own ``indexer`` with hidden states and the queries' latent."""

    rope_layout: Layout
    decode = "sparse"  # these models never attend densely

    def selector(self, config: Any) -> IndexerSelector:
        """Per-query top-k of the size in the config."""
        return IndexerSelector(topk=config.index_topk, query_block=1)

    def indexer(self, attention: Attention) -> LightningIndexer | None:
        """A `LightningIndexer` over the module's own maps, so that training it trains the model's indexer."""
        own = attention.indexer
        if own is None:  # it shares the top-k of an earlier layer
            return None
        with torch.device("meta"):
            indexer = LightningIndexer(
                own.hidden_size, query_dim=own.q_lora_rank, heads=own.n_heads, head_dim=own.head_dim,
                rope_dim=own.qk_rope_head_dim, rope_layout=self.rope_layout,
            )  # fmt: skip
        for name in ("wq_b", "wk", "k_norm", "weights_proj"):
            setattr(indexer, name, getattr(own, name))
        return indexer

    def new_indexer(
        self, attention: Attention, head_dim: int, activation: Activation, heads: int = 1, temperature: bool = False
    ) -> Indexer:
        """Raises: these models have indexers."""
        raise ValueError(f"{self.name} has indexers of its own: train those, and leave `indexers` out")

    def project(self, indexer: Indexer, inputs: Inputs) -> IndexTensors:
        """From hidden states and latent, with the dims of a head in the order of the model's cache."""
        index = indexer(
            inputs.hidden.detach(),
            None if inputs.latent is None else inputs.latent.detach(),
            position_embeddings=inputs.position_embeddings,
        )
        if self.rope_layout == "half":
            return index
        return index._replace(
            index_q=_evens_first(index.index_q, indexer.rope_dim), index_k=_evens_first(index.index_k, indexer.rope_dim)
        )

    def fingerprint(self, attention: Attention) -> Tensor:
        """Of the latent's projection."""
        return few(attention.q_a_proj)


def _evens_first(x: Tensor, dim: int) -> Tensor:
    """Rotated pairs ``(x0, x1), (x2, x3), ...`` as transformers lays them out: all first ones, then all second ones."""
    return torch.cat((x[..., 0:dim:2], x[..., 1:dim:2], x[..., dim:]), -1)
