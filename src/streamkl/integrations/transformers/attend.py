"""Causal attention that hands out its log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def has_lse(query: Tensor, value: Tensor) -> bool:
    """Whether PyTorch's attention computes a log-sum-exp for these tensors and hands it out."""
    return query.device.type == "cpu" and value.shape[-1] <= query.shape[-1]


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Causal attention ``[B, H, N, Dv]`` and the log-sum-exp of its logits ``[B, H, N]``, where `has_lse`.

    Args:
        query: ``[B, H, N, D]``.
        key: ``[B, Hkv, N, D]``.
        value: ``[B, Hkv, N, Dv]``.
        scale: Multiplies the products; ``1/sqrt(D)`` if not given.
    """
    width, group = value.shape[-1], query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) if group > 1 else x for x in (key, value))
    if width < query.shape[-1]:  # latent attention has narrower values; the kernel needs one width
        value = functional.pad(value, (0, query.shape[-1] - width))
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, is_causal=True, scale=scale
    )
    return output[..., :width], lse
