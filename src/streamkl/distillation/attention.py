"""The attention implementation of the frozen teacher: dense attention that hands its log-sum-exp to captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from streamkl.autocasting import autocast
from streamkl.dense_attention import causal_attention, compressed_attention, merged, window_attention, with_rest
from streamkl.distillation.layer import UNDER_WAY
from streamkl.integrations.transformers.families import family_of
from streamkl.integrations.transformers.recording import Attended, captures_of, refuse
from streamkl.sparse import AttentionCall, sparse_attention

NAME = "streamkl_distill"


class Causal:
    """The mask of sequences without padding, which needs no tensor. A slice of it is the whole mask.

    Attributes:
        window: How many keys a query sees, its own included, or of how many a chunk is; ``None`` for all before it.
        with_compressed: Whether a query sees compressed keys besides those of its window.
        dtype: That of a mask which a model may combine with one of its own.
    """

    dtype = torch.bool

    def __init__(self, window: int | None = None, with_compressed: bool = False) -> None:
        self.window, self.with_compressed = window, with_compressed

    def __getitem__(self, part: Any) -> Causal:
        return self

    def is_floating_point(self) -> bool:
        """No, it is a mask of bool."""
        return False

    def __and__(self, selected: Any) -> Causal:
        return self  # the keys that are selected, if any are, are in the batch


def register() -> None:
    """Makes the implementation known to transformers, with its masks."""
    AttentionInterface.register(NAME, distill_attention)
    AttentionMaskInterface.register(NAME, distill_mask)


def distill_mask(
    *args: Any,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> Causal | Tensor | None:
    """`Causal` where there is no padding and no mask but the causal one, else SDPA's mask.

    transformers takes the positions of a rank's own tokens for packed sequences; they are one sequence, and attention
    in a window gets its width as an argument, too.
    """
    config = kwargs.get("config")
    if attention_mask is None and local_size is not None and config is not None and family_of(config).windowed:
        return Causal(local_size, with_compressed=True)
    batch = UNDER_WAY.get()
    is_shared = batch is not None and batch.context is not None and not batch.by_heads
    if attention_mask is None and (mask_function is causal_mask_function or is_shared):
        return Causal(local_size)
    return sdpa_mask(*args, mask_function=mask_function, attention_mask=attention_mask, local_size=local_size, **kwargs)


def distill_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Causal | Tensor | None,
    *,
    scaling: float | None = None,
    indices: Tensor | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attends to all keys, or those selected in this batch, and hands q, k and the log-sum-exp to captures.

    Where ranks share a sequence, the keys are those of all ranks. Where they share the heads instead, captures get all
    heads of this rank's tokens.

    Args:
        module: The attention module.
        query: ``[B, H, N, D]``, after RoPE.
        key: ``[B, Hkv, N, D]``.
        value: ``[B, Hkv, N, Dv]``.
        attention_mask: The mask of `distill_mask`.
        scaling: Multiplies the products; ``1/sqrt(D)`` if not given.
        indices: What a model's own indexer returned; the keys that were selected are in the batch.
        s_aux: ``[H]``: the logits of attention sinks, if the model has them.
        kwargs: The arguments that models pass to every implementation.

    Returns:
        ``[B, N, H, Dv]``, and ``None`` for the attention weights.
    """
    captures = captures_of(module)
    number: Any = getattr(module, "layer_idx", None)
    batch = UNDER_WAY.get()
    context = None if batch is None else batch.context
    if not captures and s_aux is None and (batch is None or context is None or batch.by_heads):
        mask = None if isinstance(attention_mask, Causal) else attention_mask
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)
    refuse(module, kwargs, "the loss")
    query, key, value = (autocast(x) for x in (query, key, value))  # RoPE leaves two of them in float32
    if isinstance(attention_mask, Causal) and attention_mask.with_compressed:
        return _with_compressed(module, query, key, value, attention_mask.window, scaling, s_aux)
    width = kwargs.get("sliding_window")
    by_heads = batch is not None and batch.by_heads
    if width is not None and (context is None or by_heads) and not captures:  # its mask, of the window, is not read
        output, lse = window_attention(query, key, value, width, scaling)
        assert s_aux is not None, "other attention to a window is SDPA's"
        return with_rest(output, lse, s_aux.to(lse)[:, None]).transpose(1, 2).contiguous(), None
    if not isinstance(attention_mask, Causal) or query.shape[2] != key.shape[2]:
        raise ValueError(
            "distillation takes whole causal sequences without padding, cache or a mask of the model's own: pack text"
        )
    selected = None if batch is None else batch.selected.pop(number, None)
    keys = None
    if selected is not None:
        keys_of = family_of(module.config).attended(module, selected, query.shape[2])
        output, lse = sparse_attention(query, key, value, keys_of, scale=scaling, return_lse=True)
    elif batch is None or context is None or batch.by_heads:
        output, lse = causal_attention(query, key, value, scaling)
    else:
        window = kwargs.get("sliding_window")
        if window != attention_mask.window:
            raise ValueError(
                f"layer {number} attends in a window of {window} keys by its argument, and of {attention_mask.window} "
                f"by its mask, as attention in chunks does, which ranks cannot share: leave context_parallel at 1"
            )
        keys = context.gather(key)
        output, lse = context.attention(query, keys, value, scale=scaling, window=window)
    rest = None if s_aux is None else s_aux.detach().to(lse)[:, None].expand_as(lse)
    if rest is not None:
        output = with_rest(output, lse, rest)
    if batch is not None and context is not None and captures:
        if batch.by_heads:
            query, key, lse = (context.heads_to_tokens(x) for x in (query, key, lse[..., None]))
            lse = lse[..., 0]
            rest = None if rest is None else context.heads_to_tokens(rest[..., None])[..., 0]
            keys = context.gather(key)
        assert keys is not None, "ranks share the sequence, or the heads"
        batch.keys[number] = keys
    for capture, layer in captures:
        capture.tell(Attended(layer, AttentionCall(query, key, scaling, lse=lse, rest=rest), selected))
    return output.transpose(1, 2).contiguous(), None


def _with_compressed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    scaling: float | None,
    s_aux: Tensor | None,
) -> tuple[Tensor, None]:
    """Attends to a window of tokens, to all or the selected compressed keys, which come after them, and to a sink.

    Captures get the compressed keys; what else the softmax covers is the rest. Those of a layer without compressed keys
    get the window's.
    """
    assert window is not None, "the mask has it"
    number: Any = getattr(module, "layer_idx", None)
    batch, tokens = UNDER_WAY.get(), query.shape[2]
    if batch is not None and batch.context is not None:
        raise ValueError("ranks cannot share compressed keys: leave context_parallel and tensor_parallel at 1")
    (k, entries), (v, entry_values) = ((x[:, :, :tokens], x[:, :, tokens:]) for x in (key, value))
    output, lse = window_attention(query, k, v, window, scaling)
    rest = None if s_aux is None else s_aux.detach().to(lse)[:, None].expand_as(lse)
    call, selected = AttentionCall(query, k, scaling, window=(window - 1, 0), lse=lse, rest=rest), None
    if key.shape[2] > tokens:
        span = family_of(module.config).key_span(module)
        selected = None if batch is None else batch.selected.pop(number, None)
        if selected is None:
            found, found_lse = compressed_attention(query, entries, entry_values, span, scaling)
        else:
            found, found_lse = sparse_attention(
                query, entries, entry_values, selected, scale=scaling, causal=False, return_lse=True
            )
        outside = lse if rest is None else torch.logaddexp(lse, rest)
        # The log-sum-exp of a row that sees no key is not read; 0 is finite.
        of_entries = found_lse.masked_fill(found_lse == -torch.inf, 0.0)
        call = AttentionCall(query, entries, scaling, lse=of_entries, rest=outside, key_span=span)
        output, lse = merged(output, lse, found, found_lse)
    if rest is not None:
        output = with_rest(output, lse, rest)
    for capture, layer in captures_of(module):
        capture.tell(Attended(layer, call, selected))
    return output.transpose(1, 2).contiguous(), None
