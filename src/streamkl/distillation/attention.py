"""The attention implementation of the frozen teacher: dense attention that hands its log-sum-exp to captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from streamkl.dense_attention import causal_attention
from streamkl.integrations.transformers.recording import Attended, captures_of, refuse
from streamkl.sparse import AttentionCall

NAME = "streamkl_distill"


class Causal:
    """The mask of sequences without padding, which needs no tensor. A slice of it is the whole mask."""

    def __getitem__(self, part: Any) -> Causal:
        return self


def register() -> None:
    """Makes the implementation known to transformers, with its masks."""
    AttentionInterface.register(NAME, distill_attention)
    AttentionMaskInterface.register(NAME, distill_mask)


def distill_mask(
    *args: Any,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Causal | Tensor | None:
    """`Causal` where there is no padding and no mask but the causal one, else SDPA's mask."""
    if mask_function is causal_mask_function and attention_mask is None:
        return Causal()
    return sdpa_mask(*args, mask_function=mask_function, attention_mask=attention_mask, **kwargs)


def distill_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Causal | Tensor | None,
    *,
    scaling: float | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attends to all keys, and hands q, k and the log-sum-exp to the captures of the module.

    Args:
        module: The attention module.
        query: ``[B, H, N, D]``, after RoPE.
        key: ``[B, Hkv, N, D]``.
        value: ``[B, Hkv, N, Dv]``.
        attention_mask: The mask of `distill_mask`.
        scaling: Multiplies the products; ``1/sqrt(D)`` if not given.
        indices: The selected keys of a model's own indexer: the teacher is dense, so they are not read.
        kwargs: The arguments that models pass to every implementation.

    Returns:
        ``[B, N, H, Dv]``, and ``None`` for the attention weights.
    """
    captures, causal = captures_of(module), isinstance(attention_mask, Causal)
    if not captures:
        mask = None if isinstance(attention_mask, Causal) else attention_mask
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **kwargs)
    refuse(module, kwargs, "the loss")
    if not causal or query.shape[2] != key.shape[2]:
        raise ValueError("distillation takes whole causal sequences without padding or cache: pack the text")
    output, lse = causal_attention(query, key, value, scaling)
    for capture, layer in captures:
        capture.tell(Attended(layer, AttentionCall(query, key, scaling, lse=lse)))
    return output.transpose(1, 2).contiguous(), None
