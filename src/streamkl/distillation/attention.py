"""The attention implementation of the frozen teacher: dense attention that keeps its log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from streamkl.dense_attention import causal_attention

if TYPE_CHECKING:
    from streamkl.distillation.layer import Layer

NAME = "streamkl_distill"
REFUSED = {"softcap": "a soft cap on logits", "s_aux": "attention sinks", "position_bias": "a bias by position"}
"""Arguments that change the softmax, which the loss does not support."""


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
    """Attends to all keys, and computes the loss of the layer's indexer.

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
    layer: Layer | None = getattr(module, "streamkl_distilled", None)
    if layer is None and not isinstance(attention_mask, Causal):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    for name, what in REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} has {what} ({name}), which the loss does not support")
    if not isinstance(attention_mask, Causal) or query.shape[2] != key.shape[2]:
        raise ValueError("distillation takes whole causal sequences without padding or cache: pack the text")
    output, lse = causal_attention(query, key, value, scaling)
    if layer is not None:
        layer.learn(query, key, scaling, lse)
    return output.transpose(1, 2).contiguous(), None
