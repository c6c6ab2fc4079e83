"""The attention function of all attention implementations of StreamKL, for ``AttentionInterface``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import streamkl
from streamkl.dense_attention import with_rest
from streamkl.integrations.transformers.layer import SparseLayer
from streamkl.integrations.transformers.masks import Mask, streamkl_mask
from streamkl.integrations.transformers.module_call import ModuleCall
from streamkl.integrations.transformers.recording import Attended, Recorded, refuse
from streamkl.integrations.transformers.selection import IMPLEMENTATIONS
from streamkl.sparse import AttentionCall, IndexTensors, WindowSelector, sparse_attention

WINDOW_BLOCK = 64
"""Queries that share the keys of their windows, where a softmax over a window covers sinks."""


def register() -> None:
    """Makes the implementations known to transformers, with their masks."""
    for name in IMPLEMENTATIONS:
        AttentionInterface.register(name, streamkl_attention)
        AttentionMaskInterface.register(name, streamkl_mask)


def streamkl_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: ModuleCall | Mask | Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    indices: Tensor | None = None,
    block_indices: IndexTensors | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attends to the keys that the layer's selector selects, or to all.

    Args:
        module: The attention module.
        query: ``[B, H, Nq, D]``, after RoPE.
        key: ``[B, Hkv, Nk, D]``, those of the cache included.
        value: ``[B, Hkv, Nk, Dv]``.
        attention_mask: The mask of `streamkl_mask`, inside of the `ModuleCall` of the layer's hook.
        scaling: Multiplies the products; ``1/sqrt(D)`` if not given.
        dropout: Of attention weights.
        indices: The selected keys of the module's own indexer, if it has one.
        block_indices: The tensors of a module's own indexer that was not given the mask, and selects here.
        kwargs: The arguments that models pass to every implementation.

    Returns:
        ``[B, Nq, H, Dv]``, and ``None`` in place of attention weights.
    """
    layer = _layer(module)
    rows, sinks = query.shape[2], None
    if layer is not None:
        if layer.family.has_sinks:
            sinks = kwargs.pop("s_aux", None)
        refuse(module, kwargs, "sparse attention")
    selector = None if layer is None else layer.selector_of(rows)
    read = selector is not None or (layer is not None and (layer.reads or layer.captured))
    if layer is not None and layer.is_global and read:
        carried = _checked(layer, attention_mask, dropout if selector is not None else 0.0, kwargs)
        if block_indices is not None:
            carried.index = block_indices
        layout = carried.mask.layout(query.device)
        call = layer.call(carried, query, key, scaling, layout)
        if sinks is not None:
            call = _with_sinks(call, sinks)
        if selector is not None:
            selected = layer.select(call, selector, indices)
            out = sparse_attention(
                call.q, call.k, layout.all_keys(value), selected, query_block=selector.query_block, scale=scaling,
                cu_seqlens_q=call.cu_seqlens_q, cu_seqlens_k=call.cu_seqlens_k, sink=sinks,
            )  # fmt: skip
            layer.tell(Attended(layer.number, call, selected, selector.query_block, layout.query_at))
            return layout.back(out, query.shape[0], rows), None
        layer.tell(Attended(layer.number, call, tokens=layout.query_at))
    mask = attention_mask.mask if isinstance(attention_mask, ModuleCall) else attention_mask
    if isinstance(mask, Mask) and layer is not None and not layer.is_global and layer.captured:
        attended = Recorded(layer.number, query, key, scaling, mask.sequences).attended()
        layer.tell(attended if sinks is None else attended._replace(call=_with_sinks(attended.call, sinks)))
    if sinks is not None and layer is not None:
        return _dense_with_sinks(module, layer, query, key, value, sinks, mask, scaling, dropout, kwargs), None
    bias = mask.tensor(query.device) if isinstance(mask, Mask) else mask
    out, _ = sdpa_attention_forward(module, query, key, value, bias, scaling=scaling, dropout=dropout, **kwargs)
    return out, None


def _dense_with_sinks(
    module: nn.Module,
    layer: SparseLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    mask: Mask | Tensor | None,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> Tensor:
    """Attention ``[B, Nq, H, Dv]`` to all keys, or to those of a window, whose softmax covers sinks, too.

    Query blocks gather the keys of their window, and have gradients. Attention to all keys is SDPA's, scaled.
    """
    if not isinstance(mask, Mask):
        raise ValueError(
            f"attention with sinks takes padding as a mask of [batch, tokens]: layer {layer.number} got "
            f"{list(mask.shape) if isinstance(mask, Tensor) else mask}"
        )
    layout, width = mask.layout(query.device), mask.sequences.window
    q, k = layout.queries(query), layout.all_keys(key)
    starts: dict[str, Any] = {"cu_seqlens_q": layout.cu_seqlens_q, "cu_seqlens_k": layout.cu_seqlens_k}
    if width is not None:
        _checked_dropout(dropout)
        window = (width - 1, 0)
        gathered = WindowSelector(width + WINDOW_BLOCK, WINDOW_BLOCK, sinks=0)  # all that a block of queries sees
        selected = gathered.select(AttentionCall(q, k, scaling, window=window, **starts))
        out = sparse_attention(
            q, k, layout.all_keys(value), selected, query_block=WINDOW_BLOCK, scale=scaling, window=window, sink=sinks,
            **starts,
        )  # fmt: skip
        return layout.back(out, query.shape[0], query.shape[2])
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, sinks)):
        raise ValueError(
            f"dense attention with sinks has no gradients under {layer.implementation} (layer {layer.number}): call "
            f"the model under torch.no_grad(), or train it under streamkl_sparse or an implementation of transformers"
        )
    bias = mask.tensor(query.device)
    out, _ = sdpa_attention_forward(module, query, key, value, bias, scaling=scaling, dropout=dropout, **kwargs)
    lse = streamkl.attention_lse(q, k, scale=scaling, causal=True, **starts)
    out, sinks = layout.queries(out.transpose(1, 2)), sinks.to(lse)
    out = with_rest(out, lse.mT, sinks) if layout.packed else with_rest(out, lse, sinks[:, None])
    return layout.back(out, query.shape[0], query.shape[2])


def _with_sinks(call: AttentionCall, sinks: Tensor) -> AttentionCall:
    """A call with the logits ``[H]`` of sinks, as rows of their own."""
    packed = call.cu_seqlens_q is not None
    wide = sinks.detach().to(torch.promote_types(call.q.dtype, torch.float32))
    tokens = call.q.shape[0 if packed else 2]
    rest = wide[:, None].expand(-1, tokens)
    return call._replace(rest=rest if packed else rest.expand(call.q.shape[0], -1, -1))


def _layer(module: nn.Module) -> SparseLayer | None:
    """The `SparseLayer` of a module; ``None`` for modules that StreamKL leaves alone, as those of vision models."""
    layer = getattr(module, "streamkl_layer", None)
    if layer is None and getattr(module, "is_causal", True):
        raise ValueError(
            f"{type(module).__name__} has no selector: call streamkl.integrations.transformers.sparsify(model, ...), "
            f"and then set an attn_implementation of StreamKL"
        )
    return layer


def _checked_dropout(dropout: float) -> None:
    if dropout:
        raise ValueError(f"sparse attention has no dropout: got {dropout}; set attention_dropout to 0, or call eval()")


def _checked(layer: SparseLayer, carried: Any, dropout: float, kwargs: dict[str, Any]) -> ModuleCall:
    """Refuses what sparse attention does not support, and returns the `ModuleCall`."""
    _checked_dropout(dropout)
    if kwargs.get("is_causal") is False:
        raise ValueError(f"sparse attention is causal: layer {layer.number} got is_causal=False")
    if not isinstance(carried, ModuleCall):
        shape = list(carried.shape) if isinstance(carried, Tensor) else carried
        raise ValueError(
            f"sparse attention takes padding as a mask of [batch, tokens]: layer {layer.number} got a mask of {shape}"
        )
    if carried.mask.sequences.window is not None:
        raise ValueError(
            f"layer {layer.number} attends with a window of {carried.mask.sequences.window} keys, and its family takes "
            f"it for one that sees all keys"
        )
    return carried
