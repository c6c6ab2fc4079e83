"""The families with an indexer of their own: DeepSeek Sparse Attention over multi-head latent attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamkl.indexer import Indexer, LightningIndexer
from streamkl.indexer.rope import Layout
from streamkl.integrations.transformers.families.base import Attention, Inputs, OwnIndexers, few
from streamkl.sparse import IndexerSelector, IndexTensors


class SparseLatent(OwnIndexers):
    """Models whose attention module calls its own ``indexer``, of relu heads that are summed.

    Modules without one attend to the keys that an earlier one's selected.
    """

    rope_layout: Layout
    kind: type[LightningIndexer] = LightningIndexer
    """What the module's own indexer computes."""
    maps: tuple[str, ...] = ("wq_b", "wk", "k_norm", "weights_proj")
    """The names of its parts."""

    def selector(self, config: Any) -> IndexerSelector:
        """Per-query top-k of the size in the config."""
        return IndexerSelector(topk=self.own_topk(config), query_block=1)

    def own_topk(self, config: Any) -> int:
        """That of the config."""
        return config.get_text_config().index_topk

    def shares(self, attention: Attention) -> bool:
        """Where the module has no indexer."""
        return attention.indexer is None

    def rotated(self, own: Any) -> int:
        """How many dims of an index head a model's own indexer rotates."""
        return own.qk_rope_head_dim

    def indexer(self, attention: Attention) -> LightningIndexer | None:
        """A `LightningIndexer` over the module's own maps, so that training it trains the model's indexer."""
        own = attention.indexer
        if own is None:
            return None
        with torch.device("meta"):
            indexer = self.kind(
                own.hidden_size, query_dim=own.wq_b.in_features, heads=own.n_heads, head_dim=own.head_dim,
                rope_dim=self.rotated(own), rope_layout=self.rope_layout,
            )  # fmt: skip
        for name in self.maps:
            setattr(indexer, name, getattr(own, name))
        return indexer

    def project(self, indexer: Indexer, inputs: Inputs) -> IndexTensors:
        """From hidden states and latent, with the dims of a head in the order of the model's cache."""
        index = self.tensors(indexer, inputs)
        if self.rope_layout == "half":
            return index
        return index._replace(
            index_q=_evens_first(index.index_q, indexer.rope_dim), index_k=_evens_first(index.index_k, indexer.rope_dim)
        )

    def tensors(self, indexer: Indexer, inputs: Inputs) -> IndexTensors:
        """The same with the dims of a head as they are."""
        return indexer(
            inputs.hidden.detach(),
            None if inputs.latent is None else inputs.latent.detach(),
            position_embeddings=inputs.position_embeddings,
        )

    def fingerprint(self, attention: Attention) -> Tensor:
        """Of the latent's projection."""
        return few(attention.q_a_proj)


def _evens_first(x: Tensor, dim: int) -> Tensor:
    """Rotated pairs ``(x0, x1), (x2, x3), ...`` as transformers lays them out: all first ones, then all second ones."""
    return torch.cat((x[..., 0:dim:2], x[..., 1:dim:2], x[..., dim:]), -1)
