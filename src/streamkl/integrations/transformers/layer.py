"""What is attached to one attention module: how it selects, its indexer, and what it was last called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from streamkl.indexer import Indexer
from streamkl.integrations.transformers import index_cache
from streamkl.integrations.transformers.families import Attention, Family, Inputs
from streamkl.integrations.transformers.layout import Layout
from streamkl.integrations.transformers.masks import Mask, Unread
from streamkl.integrations.transformers.own_indexer import OwnIndexer
from streamkl.integrations.transformers.selection import IMPLEMENTATIONS, PREFIX
from streamkl.sparse import AttentionCall, IndexerSelector, IndexTensors, Selector


class Attended(NamedTuple):
    """One layer's attention, as a watcher sees it.

    Attributes:
        layer: The number of the layer.
        call: Its q and k, after RoPE, the mask, and the indexer's tensors, with their graph if gradients are enabled.
        indices: The lists of keys that were attended to; ``None`` if all were.
        block: How many queries share a list.
    """

    layer: int
    call: AttentionCall
    indices: Tensor | None
    block: int


class SparseLayer:
    """Belongs to one attention module, as its attribute ``streamkl_layer``."""

    def __init__(
        self,
        module: Attention,
        family: Family,
        selector: Selector,
        indexer: Indexer | None,
        decode: Literal["dense", "sparse"],
        watchers: list[Callable[[Attended], None]],
    ) -> None:
        self.module, self.family, self.selector, self.indexer = module, family, selector, indexer
        self.decode: Literal["dense", "sparse"] = decode
        self.watchers = watchers
        self.number: int = module.layer_idx
        self.is_global = family.is_global(module)
        self.has_own_indexer = hasattr(module, "indexer")
        self.inputs: Inputs | None = None
        self.index: IndexTensors | None = None
        self._hook: RemovableHandle | None = None

    def attach(self) -> None:
        """Reads what the module is called with from now on."""
        self.module.streamkl_layer = self
        self._hook = self.module.register_forward_pre_hook(self.before_attention, with_kwargs=True)
        if self.has_own_indexer and self.module.indexer is not None:
            self.module.indexer.forward = OwnIndexer(self, self.module.indexer.forward)

    def detach(self) -> None:
        """Leaves the module as it was."""
        if self._hook is not None:
            self._hook.remove()
        if self.has_own_indexer and self.module.indexer is not None:
            self.module.indexer.forward = self.module.indexer.forward.original
        del self.module.streamkl_layer

    @property
    def implementation(self) -> str:
        """The attention implementation that the model runs with now."""
        return self.module.config._attn_implementation

    @property
    def active(self) -> Selector | None:
        """What selects keys under this implementation; ``None`` for dense attention."""
        if not self.is_global or not self.implementation.startswith(PREFIX):
            return None
        return IMPLEMENTATIONS[self.implementation](self.selector)

    def selector_of(self, rows: int) -> Selector | None:
        """What selects keys for a call of so many queries."""
        return None if rows == 1 and self.decode == "dense" else self.active

    @property
    def reads(self) -> bool:
        """Whether calls need the indexer's tensors, to select by or to watch, or the cache their index keys."""
        return self.indexer is not None and (self.active is self.selector or bool(self.watchers))

    @property
    def has_own_lists(self) -> bool:
        """Whether the lists come from an indexer of the model's own, this module's or one before it."""
        return self.has_own_indexer and isinstance(self.active, IndexerSelector)

    def before_attention(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """A forward pre-hook: keeps what the indexer reads until the attention function asks for it."""
        if not self.implementation.startswith(PREFIX):
            return None
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Mask):
            mask.tell(kwargs.get("position_ids"), kwargs.get("cu_seq_lens_q"))
        if self.has_own_indexer:
            return (args, {**kwargs, "attention_mask": Unread(mask)}) if isinstance(mask, Mask) else None
        if self.reads:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            self.inputs = Inputs(hidden, kwargs["position_embeddings"], cache=kwargs.get("past_key_values"))
        return None

    def call(self, query: Tensor, key: Tensor, scale: float | None, layout: Layout) -> AttentionCall:
        """What a selector looks at, of a call that has reached the attention function.

        Args:
            query: ``[B, H, Nq, D]``.
            key: ``[B, Hkv, Nk, D]``.
            scale: Multiplies the products.
            layout: Of the call.
        """
        inputs, index, self.inputs, self.index = self.inputs, self.index, None, None
        if inputs is not None:
            assert self.indexer is not None, "inputs are kept for an indexer"
            index = self.family.project(self.indexer, inputs)
            if inputs.cache is not None:
                before = layout.keys - query.shape[2]
                index = index._replace(index_k=index_cache.extended(inputs.cache, self.number, index.index_k, before))
        return AttentionCall(
            layout.queries(query), layout.all_keys(key), scale, cu_seqlens_q=layout.cu_seqlens_q,
            cu_seqlens_k=layout.cu_seqlens_k, index=None if index is None else layout.index_tensors(index),
        )  # fmt: skip

    def tell(self, attended: Attended) -> None:
        """Tells the watchers."""
        for watch in self.watchers:
            watch(attended)
