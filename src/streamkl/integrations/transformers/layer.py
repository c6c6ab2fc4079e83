"""The sparse state of one attention module: its selector and its indexer."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from streamkl.indexer import Indexer
from streamkl.integrations.transformers import index_cache
from streamkl.integrations.transformers.families import Attention, Family
from streamkl.integrations.transformers.layout import Layout
from streamkl.integrations.transformers.masks import Mask
from streamkl.integrations.transformers.module_call import ModuleCall
from streamkl.integrations.transformers.own_indexer import OwnIndexer
from streamkl.integrations.transformers.recording import Attended, captures_of
from streamkl.integrations.transformers.selection import IMPLEMENTATIONS, PREFIX
from streamkl.sparse import AttentionCall, IndexerSelector, OracleSelector, Selector


class SparseLayer:
    """The attribute ``streamkl_layer`` of one attention module. No call changes it.

    Args:
        module: The attention module.
        family: Of its model.
        selector: Selects keys under ``streamkl_sparse``.
        indexer: Its indexer, if it has one.
        decode: How a single query attends.
        parallel: Whether the module sees some of the heads only, since other processes have the others.
    """

    def __init__(
        self,
        module: Attention,
        family: Family,
        selector: Selector,
        indexer: Indexer | None,
        decode: Literal["dense", "sparse"],
        parallel: bool = False,
    ) -> None:
        self.module, self.family, self.selector, self.indexer = module, family, selector, indexer
        self.decode: Literal["dense", "sparse"] = decode
        self.parallel = parallel
        self.number: int = module.layer_idx
        self.is_global = family.is_global(module)
        self.has_own_indexer = hasattr(module, "indexer")
        self._hook: RemovableHandle | None = None

    def attach(self) -> None:
        """Hooks into the calls of the module."""
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
    def is_ours(self) -> bool:
        """Whether the model runs with an attention implementation of StreamKL now."""
        return self.implementation.startswith(PREFIX)

    @property
    def active(self) -> Selector | None:
        """The selector under this implementation; ``None`` for dense attention.

        A module without an indexer in a model that has them, of its own and not those of earlier layers, is dense.
        """
        if not self.is_global or not self.is_ours:
            return None
        selector = IMPLEMENTATIONS[self.implementation](self.selector)
        has_none = self.has_own_indexer and self.module.indexer is None and not self.family.shares(self.module)
        return None if has_none and isinstance(selector, IndexerSelector) else selector

    def selector_of(self, rows: int) -> Selector | None:
        """The selector for a call of ``rows`` queries."""
        return None if rows == 1 and self.decode == "dense" else self.active

    @property
    def captured(self) -> bool:
        """Whether this call is captured."""
        return bool(captures_of(self.module))

    @property
    def reads(self) -> bool:
        """Whether calls need the indexer's tensors, to select by or to capture, or the cache their index keys."""
        return self.indexer is not None and (self.active is self.selector or self.captured)

    @property
    def selects_itself(self) -> bool:
        """Whether the selected keys come from an indexer of the model, in this module or an earlier one."""
        return self.has_own_indexer and isinstance(self.active, IndexerSelector)

    def select(self, call: AttentionCall, selector: Selector, indices: Tensor | None) -> Tensor:
        """The selected keys of a call: ``indices`` are those of the module's own indexer, if it has selected."""
        if self.parallel and isinstance(selector, OracleSelector):
            raise ValueError(
                "the oracle selects keys by the attention of all heads, and in tensor parallelism each process has "
                "some of them: load the model without it, or select with indexers"
            )
        if not self.selects_itself:
            return selector.select(call)
        if self.family.selects_late:
            assert self.indexer is not None, "layers without an indexer see all keys"
            return self.family.select_late(self.indexer, call, selector)
        assert indices is not None, "a module with an indexer of its own passes its selected keys on"
        return indices

    def before_attention(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        """A forward pre-hook: adds the `ModuleCall` that the attention function needs."""
        given = (*args, kwargs.get("attention_mask"))
        mask = next((each for each in given if isinstance(each, Mask)), None)
        if mask is None:
            return None
        mask.tell(kwargs.get("cu_seq_lens_q"))
        call = ModuleCall(mask)
        if self.reads and not self.has_own_indexer:
            # Detached: an indexer learns from its layer's attention, and its loss does not reach the model.
            call.inputs = self.family.inputs(module, args, kwargs).detached()
        args = tuple(call if each is mask else each for each in args)
        return args, {name: call if each is mask else each for name, each in kwargs.items()}

    def call(
        self, carried: ModuleCall, query: Tensor, key: Tensor, scale: float | None, layout: Layout
    ) -> AttentionCall:
        """The inputs of a selector, for a call that has reached the attention function.

        Args:
            carried: The `ModuleCall` of the call.
            query: ``[B, H, Nq, D]``.
            key: ``[B, Hkv, Nk, D]``.
            scale: Multiplies the products.
            layout: Of the call.
        """
        inputs, index = carried.inputs, carried.index
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
        """Hands an attention to the captures of this call."""
        for capture, _ in captures_of(self.module):
            capture.tell(attended)
