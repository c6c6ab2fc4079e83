"""Causal attention to all keys, in a window or to compressed keys that keeps its log-sum-exp: a frozen teacher's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from streamkl.api import attention_lse

WINDOW_ROWS = 256
"""The fewest queries of a block of windowed attention."""


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
        output, lse = merged(output, lse, *_flash(q, k[:, :, :before], v[:, :, :before], False, factor))
    return output[..., :width], lse


@torch.no_grad()
def window_attention(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Causal attention to the last ``window`` keys of each query, its own among them, and the log-sum-exp.

    Queries go in blocks, each with the keys that it may see: work and memory are linear in the tokens. Shapes are those
    of `causal_attention`, and the last query sees the last key.
    """
    before, grouped, outputs = k.shape[2] - q.shape[2], q.shape[1] > k.shape[1], []
    block = max(window, WINDOW_ROWS)
    for start in range(0, q.shape[2], block):
        rows = slice(start, min(start + block, q.shape[2]))
        keys = slice(max(0, before + start - window + 1), before + rows.stop)
        place = torch.arange(before + rows.start, before + rows.stop, device=q.device)[:, None]
        distance = place - torch.arange(keys.start, keys.stop, device=q.device)
        mask = (distance >= 0) & (distance < window)
        outputs.append(
            functional.scaled_dot_product_attention(
                q[:, :, rows], k[:, :, keys], v[:, :, keys], attn_mask=mask, scale=scale, enable_gqa=grouped
            )
        )
    output = torch.cat(outputs, 2) if outputs else q.new_empty((*q.shape[:3], v.shape[3]))
    return output, attention_lse(q, k, scale=scale, causal=True, window=(window - 1, 0))


@torch.no_grad()
def compressed_attention(
    q: Tensor, k: Tensor, v: Tensor, key_span: int, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention to keys that stand for ``key_span`` tokens each, and the log-sum-exp: ``key_span`` of the losses.

    Runs of ``key_span`` queries, the first of which ends a key, see the same keys. So the queries of a run are heads of
    causal attention with as many queries as keys. Queries that see no key have an output of 0 and a log-sum-exp of
    -inf.

    Args:
        q: ``[B, H, N, D]``: the queries of a whole sequence.
        k: ``[B, Hkv, N // key_span, D]``, where ``Hkv`` divides ``H``.
        v: ``[B, Hkv, N // key_span, Dv]``.
        key_span: How many tokens a key stands for.
        scale: Multiplies the products; ``1/sqrt(D)`` if not given.
    """
    (batch, heads, tokens), keys = q.shape[:3], k.shape[2]
    output = q.new_zeros((batch, heads, tokens, v.shape[3]))
    lse = torch.full(q.shape[:3], -torch.inf, dtype=_lse_dtype(q), device=q.device)
    if keys == 0:
        return output, lse
    first = key_span - 1  # the first query that sees a key
    missing = keys * key_span - (tokens - first)  # of the last run
    runs = functional.pad(q[:, :, first:], (0, 0, 0, missing)).unflatten(2, (keys, key_span))
    found, found_lse = causal_attention(runs.transpose(2, 3).flatten(1, 2), k, v, scale)  # [B, H * key_span, keys, Dv]
    for to, x in ((output, found), (lse[..., None], found_lse[..., None])):
        rows = x.unflatten(1, (heads, key_span)).transpose(2, 3).flatten(2, 3)
        to[:, :, first:] = rows[:, :, : tokens - first]
    return output, lse


def with_rest(output: Tensor, lse: Tensor, rest: Tensor) -> Tensor:
    """Attention whose softmax covers more than its keys: their share of it scales the output.

    Args:
        output: ``[..., Dv]``: attention over the keys alone.
        lse: ``[...]``: the log-sum-exp of their logits.
        rest: The same of what else the softmax covers, such as the logit of a sink; broadcast to ``lse``.
    """
    # The sigmoid of the difference, but with a gradient that holds where a share is small: torch's is y * (1 - y).
    share = torch.nn.functional.logsigmoid(lse - rest).exp()
    return (output * share[..., None]).to(output.dtype)


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


def merged(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys, from that over each of them: ``[..., Dv]``, and log-sum-exps ``[...]``.

    A row may see no key of one of them, where its log-sum-exp is -inf.
    """
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
        # loads DTensor and the compiler, most of a second
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(nq, nk)
        output = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return output, attention_lse(q, k, scale=scale, causal=True)
