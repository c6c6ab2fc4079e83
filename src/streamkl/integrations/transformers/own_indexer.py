"""The replacement for the forward of an indexer that a model has itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from streamkl.indexer import Indexer
from streamkl.integrations.transformers.families import Family, Inputs
from streamkl.integrations.transformers.module_call import ModuleCall
from streamkl.sparse import AttentionCall, IndexerSelector, IndexTensors, Selector


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
    def is_ours(self) -> bool:
        """Whether the model runs with an attention implementation of StreamKL now."""
        ...

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
    their graph, which ends at the indexer's inputs; the top-k is selected tile by tile, and nothing of size
    ``[Nq, Nk]`` is allocated.
    """

    def __init__(self, layer: IndexedLayer, original: Callable[..., Tensor | IndexTensors]) -> None:
        self.layer, self.original = layer, original
        self._signature = inspect.signature(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | IndexTensors:
        """The selected keys, or under another selector an empty tensor; takes the arguments of the forward.

        In families that `Family.selects_late` it is the indexer's tensors.
        """
        layer, given = self.layer, self._signature.bind(*args, **kwargs).arguments
        carried, cache = given.get("attention_mask"), given.get("past_key_values")
        late = layer.family.selects_late and layer.is_ours
        if not late and not isinstance(carried, ModuleCall):
            return self.original(*args, **kwargs)
        assert layer.indexer is not None, "this is the forward of an indexer"
        inputs = Inputs.of_own(given).detached()
        index = layer.family.project(layer.indexer, inputs)
        if cache is not None:
            index = index._replace(index_k=layer.family.cached(cache, layer.number, index.index_k))
        if late:
            return index
        assert isinstance(carried, ModuleCall), "an indexer that selects is given the mask"
        if layer.reads:
            carried.index = index
        if not isinstance(layer.active, IndexerSelector):
            return inputs.hidden.new_empty(0)
        layout = carried.mask.layout(inputs.hidden.device)
        index = layout.index_tensors(index)
        # The attention's own q and k do not exist yet, and an indexer does not read them.
        stand_in = AttentionCall(
            index.index_q, index.index_k.unsqueeze(1), cu_seqlens_q=layout.cu_seqlens_q,
            cu_seqlens_k=layout.cu_seqlens_k, index=index,
        )  # fmt: skip
        return layer.active.select(stand_in)
