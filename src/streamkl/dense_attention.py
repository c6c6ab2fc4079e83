"""Dense causal attention that keeps its log-sum-exp: that of a frozen teacher."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from streamkl.api import attention_lse


@torch.no_grad()
def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Causal attention ``[B, H, Nq, Dv]`` and the log-sum-exp of its logits ``[B, H, Nq]``. Constants.

    The last query sees all keys. On the CPU both come from PyTorch's flash attention, which is aligned top-left: so the
    keys before the first query's own are attended to without a mask, and merged with the rest. Elsewhere the
    log-sum-exp takes another pass.

    Args:
        q: ``[B, H, Nq, D]``.
        k: ``[B, Hkv, Nk, D]``, where ``Hkv`` divides ``H`` and ``Nk >= Nq``.
        v: ``[B, Hkv, Nk, Dv]``.
        scale: Multiplies the products; ``1/sqrt(D)`` if not given.
    """
    before = k.shape[2] - q.shape[2]
    if before < 0:
        raise ValueError(f"every query must see a key: got {q.shape[2]} queries and {k.shape[2]} keys")
    if q.shape[2] == 0:  # PyTorch's kernel divides by the number of queries
        return q.new_empty((*q.shape[:3], v.shape[3])), torch.empty(q.shape[:3], dtype=_lse_dtype(q), device=q.device)
    if q.device.type != "cpu":
        return _on_device(q, k, v, scale)
    factor = float(q.shape[3] ** -0.5 if scale is None else scale)
    width = v.shape[3]
    widest = max(width, q.shape[3])  # the kernel needs one width; zeros change no product
    q, k, v = (functional.pad(x, (0, widest - x.shape[3])) if x.shape[3] < widest else x for x in (q, k, v))
    output, lse = _flash(q, k[:, :, before:], v[:, :, before:], True, factor)
    if before:
        output, lse = _merged(output, lse, *_flash(q, k[:, :, :before], v[:, :, :before], False, factor))
    return output[..., :width], lse


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """PyTorch's flash attention on the CPU. Heads that share a key are a batch element: no key is copied for them."""
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    if group > 1:
        q = q.unflatten(1, (kv_heads, group)).flatten(0, 1)
        k, v = (x.flatten(0, 1)[:, None].expand(-1, group, -1, -1) for x in (k, v))
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=causal, scale=scale)
    if group > 1:
        output, lse = (x.unflatten(0, (-1, kv_heads)).flatten(1, 2) for x in (output, lse))
    return output, lse


def _merged(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys, from that over each of them."""
    both = torch.logaddexp(lse, other_lse)
    share, other_share = (torch.exp(x - both)[..., None] for x in (lse, other_lse))
    return (output * share + other * other_share).to(output.dtype), both


def _on_device(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """By ``scaled_dot_product_attention``, which gives no log-sum-exp: that takes another pass."""
    nq, nk = q.shape[2], k.shape[2]
    grouped = q.shape[1] > k.shape[1]
    if nq == nk:
        output = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    else:
        mask = causal_lower_right(nq, nk)
        output = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return output, attention_lse(q, k, scale=scale, causal=True)
