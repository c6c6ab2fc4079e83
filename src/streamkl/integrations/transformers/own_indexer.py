"""The replacement for the forward of an indexer that a model has itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from streamkl.indexer import Indexer
from streamkl.integrations.transformers.families import Family, Inputs
from streamkl.integrations.transformers.module_call import ModuleCall
from streamkl.sparse import AttentionCall, IndexerSelector, Selector


class IndexedLayer(Protocol):
    """What the forward of an own indexer reads of its layer, which is a `SparseLayer`.

    Attributes:
        family: Of its model.
        indexer: The model's own.
        number: Of the layer, in the cache.
    """

    family: Family
    indexer: Indexer | None
    number: int

    @property
    def reads(self) -> bool:
        """Whether calls need the indexer's tensors."""
        ...

    @property
    def active(self) -> Selector | None:
        """The selector under this implementation."""
        ...


class OwnIndexer:
    """The ``forward`` of an indexer that transformers runs without gradients.

    Under implementations of transformers it calls that forward. Under those of StreamKL the indexer's tensors keep
    their graph, the top-k is selected tile by tile, and nothing of size ``[Nq, Nk]`` is allocated.
    """

    def __init__(self, layer: IndexedLayer, original: Callable[..., Tensor]) -> None:
        self.layer, self.original = layer, original

    def __call__(
        self,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
    ) -> Tensor:
        """The selected keys, or under another selector an empty tensor."""
        layer = self.layer
        if not isinstance(attention_mask, ModuleCall):
            return self.original(
                hidden_states, q_resid, position_embeddings, attention_mask, position_ids,
                past_key_values=past_key_values,
            )  # fmt: skip
        assert layer.indexer is not None, "this is the forward of an indexer"
        index = layer.family.project(layer.indexer, Inputs(hidden_states, position_embeddings, q_resid))
        if past_key_values is not None:
            index = index._replace(index_k=past_key_values.update_indexer(index.index_k, layer.number))
        if layer.reads:
            attention_mask.index = index
        if not isinstance(layer.active, IndexerSelector):
            return hidden_states.new_empty(0)
        layout = attention_mask.mask.layout(hidden_states.device)
        index = layout.index_tensors(index)
        # The attention's own q and k do not exist yet, and an indexer does not read them.
        stand_in = AttentionCall(
            index.index_q, index.index_k.unsqueeze(1), cu_seqlens_q=layout.cu_seqlens_q,
            cu_seqlens_k=layout.cu_seqlens_k, index=index,
        )  # fmt: skip
        return layer.active.select(stand_in)
